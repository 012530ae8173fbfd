"""Measure a model on a labelled set: the examples are computed once, whatever the set's size.

    python examples/few_shot_eval.py [--model PATH | --url URL]

`run_batch` finds what all prompts begin with. `select` scores the labels instead of letting the
model write freely, so every answer is one of them.
"""

from __future__ import annotations

import rootlace as rl
from backend import arguments, backend

LABELS = ["positive", "negative"]
SHOTS = [
    ("The soup was delicious.", "positive"),
    ("I hated the movie.", "negative"),
    ("What a lovely hotel!", "positive"),
    ("The phone stopped working.", "negative"),
    ("The staff was so friendly.", "positive"),
    ("A boring show.", "negative"),
]
TESTS = [
    ("The pizza was wonderful.", "positive"),
    ("The service was terrible.", "negative"),
    ("I loved the book.", "positive"),
    ("Never again this restaurant.", "negative"),
    ("The concert was amazing!", "positive"),
    ("Such a dirty room.", "negative"),
    ("Five stars for the coffee.", "positive"),
    ("I want my money back.", "negative"),
    ("The game is great fun.", "positive"),
    ("The waiter was rude.", "negative"),
]


@rl.function
def classify(s: rl.ProgramState, text: str) -> None:
    s += "".join(f"Review: {review}\nLabel: {label}\n\n" for review, label in SHOTS)
    s += f"Review: {text}\nLabel: " + rl.select("label", LABELS)


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        states = classify.run_batch([{"text": text} for text, _ in TESTS], progress_bar=True)
        right = 0
        for state, (text, label) in zip(states, TESTS, strict=True):
            right += state["label"] == label
            print(f"{'ok   ' if state['label'] == label else 'WRONG'} {text} {state['label']}")
        metas = [state.get_meta_info("label") for state in states]
    prompt = sum(meta["prompt_tokens"] for meta in metas)
    cached = sum(meta["cached_tokens"] for meta in metas)
    print(f"accuracy {right / len(TESTS):.0%}, {cached / prompt:.0%} of the prompt tokens cached")


if __name__ == "__main__":
    main()
