"""Answer questions from documents: find the right one, put it before the question, generate.

    python examples/rag.py [--model PATH | --url URL] ["a question" ...]

Every document is put *first* in its prompt, so questions on the same document share its KV: only
the first of them computes it.
"""

from __future__ import annotations

import math
import re
from collections import Counter

import rootlace as rl
from backend import arguments, backend

DOCUMENTS = [
    "Ida Lund is 47 years old. Ida Lund lives in Bergfeld. She works as a pilot.",
    "Karl Brandt is 31 years old. Karl Brandt lives in Norwick. He works as a baker.",
    "Maria Costa is 62 years old. Maria Costa lives in Alden. She works as a judge.",
    "Tom Becker is 25 years old. Tom Becker lives in Lindau. He works as a nurse.",
]
QUESTIONS = ["How old is Karl Brandt?", "Where does Karl Brandt live?", "How old is Maria Costa?"]


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


class Index:
    """Documents by the words they share with a question, rare words counting more (TF-IDF)."""

    def __init__(self, documents: list[str]) -> None:
        self._documents = documents
        self._counts = [words(document) for document in documents]
        self._seen_in = Counter(word for count in self._counts for word in count)

    def best(self, question: str) -> str:
        def score(index: int) -> float:
            count = self._counts[index]
            return sum(
                count[word] * math.log(len(self._documents) / self._seen_in[word])
                for word in words(question)
                if word in count
            )

        return self._documents[max(range(len(self._documents)), key=score)]


@rl.function
def answer(s: rl.ProgramState, document: str, question: str) -> None:
    s += rl.user(f"{document}\n\n{question}")
    s += rl.assistant(rl.gen("answer", max_tokens=24, temperature=0))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    given = parser.parse_args()
    index = Index(DOCUMENTS)
    with backend(given):
        batch = [
            {"document": index.best(question), "question": question} for question in given.questions
        ]
        for item, state in zip(batch, answer.run_batch(batch), strict=True):
            cached = state.get_meta_info("answer")["cached_tokens"]
            print(f"{item['question']} -> {state['answer']}   ({cached} tokens from the cache)")


if __name__ == "__main__":
    main()
