"""Answer questions from documents, and cite the source of the answer.

    python examples/rag.py [--model NAME | --url URL] ["a question" ...]

SQLite's full-text index finds the documents that share words with the question (BM25). The model
chooses one of these as the source; a constraint excludes all others. The answer comes from that
document alone. The document stands before the question, so questions on one document share its KV.

SmolLM2-135M finds facts that one or two sentences state outright, after examples. The model does
not combine documents. Instead of reporting a missing answer, the model takes the nearest one.
"""

from __future__ import annotations

import re
import sqlite3

import rootlace as rl
from backend import arguments, backend

DOCUMENTS = {
    "Ida Lund": "Ida Lund is 47 years old. Ida Lund lives in Bergfeld. She works as a pilot.",
    "Karl Brandt": "Karl Brandt is 31 years old. Karl Brandt lives in Norwick. He is a baker.",
    "Maria Costa": "Maria Costa is 62 years old. Maria Costa lives in Alden. She is a judge.",
    "Tom Becker": "Tom Becker is 25 years old. Tom Becker lives in Lindau. He is a nurse.",
}
QUESTIONS = [
    "How old is Karl Brandt?",
    "Where does Karl Brandt live?",
    "How old is Maria Costa?",
    "What is the job of Ida Lund?",
]


SHOTS = """\
Anna Berg is 54 years old. Anna Berg lives in Riga. She works as a teacher.
Question: How old is Anna Berg?
Answer: 54
Question: Where does Anna Berg live?
Answer: Riga
Question: What is the job of Anna Berg?
Answer: teacher

"""


class Index:
    """Documents by their titles, found by their words."""

    def __init__(self, documents: dict[str, str]) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
        self._database.executemany("INSERT INTO documents VALUES (?, ?)", documents.items())

    def find(self, question: str, most: int = 3) -> dict[str, str]:
        """Return the best documents, best first; none if no document has a word of the question."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", question))
        query = "SELECT * FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?"
        return dict(self._database.execute(query, (words, most)).fetchall() if words else ())


@rl.function
def answer(s: rl.ProgramState, question: str, found: dict[str, str]) -> str:
    """Return the source; the answer is in the state."""
    (asked,) = s.fork(1)
    asked += f"Question: {question}\nName: " + rl.select("source", list(found))
    source: str = asked["source"]
    s += f"{SHOTS}{found[source]}\nQuestion: {question}\nAnswer:"
    s += rl.gen("answer", max_tokens=24, temperature=0, stop="\n")
    return source


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    given = parser.parse_args()
    index = Index(DOCUMENTS)
    with backend(given):
        batch = [{"question": asked, "found": index.find(asked)} for asked in given.questions]
        for item in batch:
            if not item["found"]:
                print(f"{item['question']} -> no document has a word of it")
        batch = [item for item in batch if item["found"]]
        for item, state in zip(batch, answer.run_batch(batch), strict=True):
            cached = state.get_meta_info("answer")["cached_tokens"]
            print(f"{item['question']} -> {state['answer'].strip()} [{state.ret_value}]", end="")
            print(f"   (of {len(item['found'])} found; {cached} tokens from the cache)")


if __name__ == "__main__":
    main()
