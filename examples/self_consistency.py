"""Self-consistency: sample several answers and continue with the commonest one.

    python examples/self_consistency.py [--model NAME | --url URL] ["a country"]

At this temperature many single answers are wrong, each in its own way. `rl.majority` forks the
state, counts the forks' answers, and cancels the rest once no other answer can win.

SmolLM2-135M knows some thirty capitals. A vote cannot know more than the model: asked for the
capital of Spain, most forks agree on Barcelona.
"""

from __future__ import annotations

from itertools import count

import rootlace as rl
from backend import arguments, backend

SHOTS = [("Greece", "Athens"), ("China", "Beijing")]
VOTES = 12


@rl.function
def vote(s: rl.ProgramState, country: str, votes: int) -> str:
    s += "".join(f"Country: {shown}\nCapital: {capital}\n\n" for shown, capital in SHOTS)
    s += f"Country: {country}\nCapital:"
    seeds = count()

    def answer(fork: rl.ProgramState) -> None:
        # Each fork has its own seed, so answers differ, but stay the same in every run.
        fork += rl.gen("answer", max_tokens=12, temperature=1.0, seed=next(seeds), stop="\n")

    winner: str = rl.majority(s, votes, answer, "answer", key=str.strip)
    return winner.strip()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("country", nargs="?", default="Norway")
    given = parser.parse_args()
    with backend(given):
        state = vote.run(given.country, VOTES)
        spans = [span for span in state.trace().spans if span.name == "answer"]
    for span in spans:
        print(span.text.strip() if span.state == "done" else f"({span.state})")
    print(f"capital of {given.country} -> {state.ret_value}")


if __name__ == "__main__":
    main()
