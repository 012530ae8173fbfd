"""Five workloads as token ids, seeded: the same requests for every engine.

Standard library only: a peer's process makes workloads itself from name, seed and scale. Every
request is greedy and asks for an exact number of tokens. `scale` changes the number of independent
units (questions, conversations, searches, requests, documents), never their lengths.

A workload is a tree of texts. A request's prompt is all text from the root to its node, with the
engine's own answers in between. If an engine does not return tokens, seeded stand-ins take their
place (`fixed_reply`): the lengths are the same, but the stand-ins are not in the engine's cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

FIRST_PLAIN_TOKEN, VOCAB_SIZE = 300, 32_000
"""Ids below may be special tokens or bytes."""

Tokens = list[int]


@dataclass(frozen=True)
class Request:
    """A prompt, and the number of wanted tokens. `name` is unique in its workload."""

    name: str
    prompt: Tokens
    wanted: int


@dataclass(frozen=True)
class Level:
    """Below each node above: `count` texts of `tokens`, which get a reply of `wanted` tokens."""

    count: int
    tokens: int
    wanted: int = 0


@dataclass(frozen=True)
class Kind:
    """`scale` changes the first count that is not 1. `interleaved`: all trees' first requests are
    submitted before any tree's second one."""

    describe: str
    levels: tuple[Level, ...]
    interleaved: bool = False


WORKLOADS = {
    "W1": Kind(
        "few-shot: 64 questions of 60 tokens behind the same 1,000, 16 out",
        (Level(1, 1000), Level(64, 60, 16)),
    ),
    "W2": Kind(
        "chat: 8 conversations behind the same 200 tokens, 4 turns of 100 in and 32 out",
        (Level(1, 200), Level(8, 100, 32), *3 * (Level(1, 100, 32),)),
    ),
    "W3": Kind(
        "tree search: 4 problems of 400 tokens, two levels of 4 thoughts, 20 in and 32 out",
        (Level(4, 400), Level(4, 20, 32), Level(4, 20, 32)),
    ),
    "W4": Kind("nothing shared: 32 prompts of 256 tokens, 64 out", (Level(32, 256, 64),)),
    "W5": Kind(
        "long documents: 6 questions of 30 tokens on each of 4 documents of 4,000, 16 out",
        (Level(4, 4000), Level(6, 30, 16)),
        interleaved=True,
    ),
}


@dataclass(frozen=True)
class Node:
    """A text, the tokens wanted behind it, and the nodes behind the reply."""

    name: str
    tokens: Tokens
    wanted: int
    below: list[Node] = field(default_factory=list)


class Workload:
    """Yields requests (`start`), and more of them as others are answered (`answered`)."""

    def __init__(
        self, name: str, seed: int | str = 0, scale: float = 1.0, vocab_size: int = VOCAB_SIZE
    ) -> None:
        self.name, self.seed, self.scale, self.vocab_size = name, seed, scale, vocab_size
        self._kind = WORKLOADS[name]
        self._nodes: dict[str, Node] = {}
        source = random.Random(f"{name}/{seed}")
        self.roots = self._grow(self._scaled(), source, "")

    @property
    def wanted(self) -> int:
        """Return the number of tokens that each request asks for."""
        return self._kind.levels[-1].wanted

    def start(self) -> list[Request]:
        trees = [list(self._requests([root], [])) for root in self.roots]
        if self._kind.interleaved:
            trees = [list(row) for row in zip(*trees, strict=True)]
        return [request for tree in trees for request in tree]

    def answered(self, request: Request, reply: Tokens) -> list[Request]:
        """Return the requests that follow a reply."""
        return list(self._requests(self._nodes[request.name].below, request.prompt + reply))

    def waves(self, replies: Mapping[str, Tokens]) -> Iterator[list[Request]]:
        """Yield all first requests, then all that follow these, and so on."""
        wave = self.start()
        while wave:
            yield wave
            wave = [next for one in wave for next in self.answered(one, replies[one.name])]

    def fixed_reply(self, request: Request) -> Tokens:
        """Return stand-ins for the tokens of an engine that returns only text."""
        source = random.Random(f"{self.name}/{self.seed}/{request.name}")
        return self._drawn(source, request.wanted)

    def _scaled(self) -> list[Level]:
        levels = list(self._kind.levels)
        place = next(i for i, level in enumerate(levels) if level.count > 1)
        full = levels[place]
        levels[place] = Level(max(1, round(full.count * self.scale)), full.tokens, full.wanted)
        return levels

    def _grow(self, levels: Sequence[Level], source: random.Random, above: str) -> list[Node]:
        if not levels:
            return []
        level, *rest = levels
        grown = []
        for index in range(level.count):
            name = f"{above}.{index}" if above else str(index)
            tokens = self._drawn(source, level.tokens)
            node = Node(name, tokens, level.wanted, self._grow(rest, source, name))
            self._nodes[name] = node
            grown.append(node)
        return grown

    def _requests(self, nodes: Sequence[Node], before: Tokens) -> Iterator[Request]:
        for node in nodes:
            prompt = before + node.tokens
            if node.wanted:
                yield Request(node.name, prompt, node.wanted)
            else:
                yield from self._requests(node.below, prompt)

    def _drawn(self, source: random.Random, count: int) -> Tokens:
        first = min(FIRST_PLAIN_TOKEN, self.vocab_size // 2)
        return [source.randrange(first, self.vocab_size) for _ in range(count)]
