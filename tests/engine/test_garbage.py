"""How the engine's process collects garbage: each time a part, and circles in the end."""

from __future__ import annotations

import subprocess
import sys

SEEN = """
import gc
from rootlace.runtime.engine.garbage import collect_in_parts
early = [[] for _ in range(200_000)]
collect_in_parts()
del early
seen = []
def note(phase, info):
    if phase == "start" and info["generation"] == 2:
        seen.append(len(gc.get_objects()))
gc.callbacks.append(note)
"""


def said(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SEEN + program], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_a_collection_looks_at_what_came_since_the_one_before() -> None:
    program = "kept = [[] for _ in range(300_000)]; print(len(seen), max(seen))"
    times, most = map(int, said(program))
    assert times >= 10 and most < 15_000


def test_circles_that_stayed_are_collected_in_the_end() -> None:
    """Each thousand is kept for as long as the next ten thousand objects take: through a full
    collection or two, but never for good."""
    program = """
class Circle:
    alive = 0
    def __init__(self):
        self.me, self.more = self, [[] for _ in range(8)]
        Circle.alive += 1
    def __del__(self):
        Circle.alive -= 1
most, held = 0, []
for _ in range(320):
    held.append([Circle() for _ in range(1000)])
    del held[:-20]
    most = max(most, Circle.alive)
print(most)
"""
    (most,) = map(int, said(program))
    assert 20_000 < most < 250_000
