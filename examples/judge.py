"""Judge a text by several criteria at once: one branch each, all over the same text.

    python examples/judge.py [--model PATH | --url URL]

The text is computed once; each criterion is a fork that adds its question and scores yes against
no.
"""

from __future__ import annotations

import math

import rootlace as rl
from backend import arguments, backend

TEXT = (
    "Ida Lund is 47 years old. Ida Lund lives in Bergfeld. She works as a pilot. "
    "Her hobby is chess."
)
CRITERIA = [
    "Is the text about a person?",
    "Does the text mention Bergfeld?",
    "Is the text about a flight?",
    "Does the text mention Lindau?",
]


@rl.function
def judge(s: rl.ProgramState, text: str, criteria: list[str]) -> None:
    s += rl.user_begin() + text
    forks = s.fork(len(criteria))
    forks += [f"\n\n{criterion}" + rl.user_end() for criterion in criteria]
    forks += rl.assistant(rl.select("verdict", ["yes", "no"]))
    forks.join()


def confidence(scores: list[float], index: int) -> float:
    """The winner's share of the probability of both answers (scores are log-probabilities)."""
    return 1 / sum(math.exp(score - scores[index]) for score in scores)


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        state = judge.run(TEXT, CRITERIA)
        metas = state.get_meta_info("verdict")
        for criterion, verdict, meta in zip(CRITERIA, state["verdict"], metas, strict=True):
            print(f"{verdict:3}  {confidence(meta['scores'], meta['index']):4.0%}  {criterion}")


if __name__ == "__main__":
    main()
