"""Branch, solve, merge: judge two texts by several criteria side by side, and sum up.

    python examples/judge.py [--model NAME | --url URL]

The common prefix shows how to judge and is computed once. Each criterion of each text is a branch
that scores "good" against "bad". The program merges the scores into a verdict with its reasons.

SmolLM2-135M tells praise from complaint in a plain sentence, after examples. The model does
not judge whether an answer is right, nor which of two texts is better; plain Python compares here.
"""

from __future__ import annotations

import rootlace as rl
from backend import arguments, backend

HOTELS = {
    "Sea View": {
        "room": "The room was clean.",
        "staff": "The staff was so friendly.",
        "food": "The food was terrible.",
    },
    "Old Mill": {
        "room": "Such a dirty room.",
        "staff": "The waiter was rude.",
        "food": "I loved the breakfast.",
    },
}
SHOTS = [
    ("The soup was delicious.", "good"),
    ("I hated the movie.", "bad"),
    ("What a lovely hotel!", "good"),
    ("The phone stopped working.", "bad"),
    ("A wonderful concert.", "good"),
    ("The service was terrible.", "bad"),
]
LABELS = ["good", "bad"]
Verdict = dict[str, dict[str, float]]
"""How much better than bad each text is, by criterion: differences of log-probabilities."""


@rl.function
def judge(s: rl.ProgramState, texts: dict[str, dict[str, str]]) -> Verdict:
    s += "".join(f"Sentence: {text}\nSentiment: {label}\n\n" for text, label in SHOTS)
    cases = [(name, criterion) for name, text in texts.items() for criterion in text]  # branch
    forks = s.fork(len(cases))
    forks += [  # solve
        f"Sentence: {texts[name][criterion]}\nSentiment: " + rl.select("label", LABELS)
        for name, criterion in cases
    ]
    verdict: Verdict = {name: {} for name in texts}
    for (name, criterion), fork in zip(cases, forks, strict=True):  # merge
        good, bad = fork.get_meta_info("label")["scores"]
        verdict[name][criterion] = good - bad
    return verdict


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        verdict: Verdict = judge.run(HOTELS).ret_value
    points = {name: sum(score > 0 for score in scores.values()) for name, scores in verdict.items()}
    for name, scores in verdict.items():
        told = ", ".join(f"{criterion} {score:+.1f}" for criterion, score in scores.items())
        print(f"{name}: {points[name]} of {len(scores)} good ({told})")
    print(f"better: {max(points, key=points.__getitem__)}")


if __name__ == "__main__":
    main()
