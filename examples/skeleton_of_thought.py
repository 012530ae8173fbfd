"""Skeleton of thought: write an outline first, then all of its points at once.

    python examples/skeleton_of_thought.py [--model NAME | --url URL] ["a topic"]

Each point is a branch that shares the outline's KV and waits for no other point. The joined points
are the text. The run takes as long as its longest point, not their sum. Patterns constrain the
outline to three points and each branch to one sentence.

SmolLM2-135M gives common tips. Unconstrained the model repeats itself. "The second" tip is
unclear to the model, so each branch names its point.
"""

from __future__ import annotations

import re

import rootlace as rl
from backend import arguments, backend

POINT = r"[A-Z][a-z '-]{4,40}:\n"
OUTLINE = rf"1\. {POINT}2\. {POINT}3\. {POINT}"
SENTENCE = r"[A-Z][^.\n\d]{20,140}\."


@rl.function
def write(s: rl.ProgramState, topic: str) -> list[tuple[str, str]]:
    """Return the points, each with its sentence."""
    s += rl.user(f"Give three tips for {topic}.")
    s += rl.assistant(rl.gen("outline", regex=OUTLINE, max_tokens=64, temperature=0))
    points = re.findall(r"^\d\. (.+):$", s["outline"], re.MULTILINE)

    with s.fork(len(points)) as forks:
        forks += [
            rl.user(f"Why should I {point[0].lower()}{point[1:]}? Answer in one sentence.")
            for point in points
        ]
        forks += rl.assistant(rl.gen("sentence", regex=SENTENCE, max_tokens=48, temperature=0))
    return list(zip(points, s["sentence"], strict=True))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("topic", nargs="?", default="a good garden")
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
