"""Self-consistency: sample several answers and go on with the one that most agree on.

    python examples/self_consistency.py [--model PATH | --url URL]

At this temperature many single answers are wrong, and each in its own way. `rl.majority` forks the
state, counts what the forks say, and cancels the rest as soon as no other answer can win.
"""

from __future__ import annotations

from itertools import count

import rootlace as rl
from backend import arguments, backend

PASSAGE = (
    "Karl Brandt is 31 years old. Karl Brandt lives in Norwick. He works as a baker. "
    "Maria Costa is 62 years old. Maria Costa lives in Alden."
)
QUESTION = "Where does Karl Brandt live?"
VOTES = 12


@rl.function
def vote(s: rl.ProgramState, passage: str, question: str, votes: int) -> str:
    s += rl.user(f"{passage}\n\n{question}")
    seeds = count()

    def answer(fork: rl.ProgramState) -> None:
        # Each has a seed of its own, so they differ, and are the same every time.
        fork += rl.assistant(rl.gen("answer", max_tokens=16, temperature=1.0, seed=next(seeds)))

    winner: str = rl.majority(s, votes, answer, "answer", key=str.strip)
    return winner


def main() -> None:
    given = arguments(__doc__).parse_args()
    with backend(given):
        state = vote.run(PASSAGE, QUESTION, VOTES)
        spans = [span for span in state.trace().spans if span.name == "answer"]
    for span in spans:
        print(span.text if span.state == "done" else f"({span.state})")
    print(f"{QUESTION} -> {state.ret_value}")


if __name__ == "__main__":
    main()
