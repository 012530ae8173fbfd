"""Skeleton of thought: write an outline first, then all of its points at once.

    python examples/skeleton_of_thought.py [--model PATH | --url URL] ["a topic"]

The points do not wait for one another: each is a branch that shares the outline's KV. Joined, they
are the text; the time is that of the longest point, not of their sum.
"""

from __future__ import annotations

import re

import rootlace as rl
from backend import arguments, backend


@rl.function
def write(s: rl.ProgramState, topic: str) -> list[tuple[str, str]]:
    """The points, each with its sentence."""
    s += rl.user(f"Give three tips for {topic}.")
    s += rl.assistant(rl.gen("outline", max_tokens=64, temperature=0))
    points = re.findall(r"^\d+\. (.+)\.$", s["outline"], re.MULTILINE)

    with s.fork(len(points)) as forks:
        forks += lambda i: rl.user(f"Expand tip {i + 1} in one sentence.")
        forks += rl.assistant(rl.gen("sentence", max_tokens=48, temperature=0))
    return list(zip(points, s["sentence"], strict=True))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("topic", nargs="?", default="saving money")
    given = parser.parse_args()
    with backend(given):
        state = write.run(given.topic)
        spans = [span for span in state.trace().spans if span.name == "sentence"]
    for point, sentence in state.ret_value:
        print(f"{point}. {sentence}")
    together = max(span.end for span in spans) - min(span.start for span in spans)
    alone = sum(span.end - span.start for span in spans)
    print(f"{alone:.2f} s of writing in {together:.2f} s")


if __name__ == "__main__":
    main()
