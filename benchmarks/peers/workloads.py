"""Five workloads as token ids, seeded: the same requests for every engine.

Standard library only: a peer's process makes them for itself from name, seed and scale. Every
request is greedy and asks for an exact number of tokens. `scale` changes the number of independent
units (questions, conversations, searches, requests, documents), never their lengths.

Follow-ups (turns of a chat, thoughts of a search) hold what the engine itself answered. Where an
engine does not tell its tokens, seeded stand-ins take their place (`fixed_reply`): the lengths are
the same, but what it generated cannot be found in its cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_PLAIN_TOKEN, VOCAB_SIZE = 300, 32_000
"""Ids below may be special tokens or bytes."""

Tokens = list[int]


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are wanted. `name` is unique in its workload."""

    name: str
    prompt: Tokens
    wanted: int


class Workload:
    """Hands out requests (`start`), and more of them as others are answered (`answered`)."""

    name = ""
    describe = ""

    def __init__(
        self, seed: int | str = 0, scale: float = 1.0, vocab_size: int = VOCAB_SIZE
    ) -> None:
        self.seed = seed
        self.scale = scale
        self._vocab_size = vocab_size
        self._random = random.Random(f"{self.name}/{seed}")
        self._draw()

    def _draw(self) -> None:
        """Draw all texts, in an order that stays."""

    def start(self) -> list[Request]:
        raise NotImplementedError

    def answered(self, request: Request, reply: Tokens) -> list[Request]:
        """The requests that follow from a reply."""
        return []

    def fixed_reply(self, request: Request) -> Tokens:
        """Stand-ins for the tokens of an engine that only tells text."""
        source = random.Random(f"{self.name}/{self.seed}/{request.name}")
        return self._drawn(source, request.wanted)

    def _tokens(self, count: int) -> Tokens:
        return self._drawn(self._random, count)

    def _drawn(self, source: random.Random, count: int) -> Tokens:
        first = min(FIRST_PLAIN_TOKEN, self._vocab_size // 2)
        return [source.randrange(first, self._vocab_size) for _ in range(count)]

    def _units(self, full: int) -> range:
        return range(max(1, round(full * self.scale)))


class FewShot(Workload):
    name = "W1"
    describe = "few-shot: 64 questions of 60 tokens behind the same 1,000, 16 out"
    WANTED = 16

    def _draw(self) -> None:
        self.examples = self._tokens(1000)
        self.questions = [self._tokens(60) for _ in self._units(64)]

    def start(self) -> list[Request]:
        return [
            Request(f"r{index}", self.examples + question, self.WANTED)
            for index, question in enumerate(self.questions)
        ]


class Chat(Workload):
    name = "W2"
    describe = "chat: 8 conversations behind the same 200 tokens, 4 turns of 100 in and 32 out"
    WANTED = 32
    TURNS = 4

    def _draw(self) -> None:
        self.system = self._tokens(200)
        self.talks = [[self._tokens(100) for _ in range(self.TURNS)] for _ in self._units(8)]
        self._turn_of: dict[str, tuple[int, int]] = {}

    def start(self) -> list[Request]:
        return [self._request(self.system, talk, 0) for talk in range(len(self.talks))]

    def answered(self, request: Request, reply: Tokens) -> list[Request]:
        talk, turn = self._turn_of[request.name]
        if turn + 1 == self.TURNS:
            return []
        return [self._request(request.prompt + reply, talk, turn + 1)]

    def _request(self, history: Tokens, talk: int, turn: int) -> Request:
        name = f"c{talk}t{turn}"
        self._turn_of[name] = talk, turn
        return Request(name, history + self.talks[talk][turn], self.WANTED)


@dataclass(frozen=True)
class Thought:
    """What a branch of a search adds, and what the branches below it add."""

    hint: Tokens
    next: list[Tokens]


class TreeSearch(Workload):
    name = "W3"
    describe = "tree search: 4 problems of 400 tokens, two levels of 4 thoughts, 20 in and 32 out"
    WANTED = 32
    WIDTH = 4

    def _draw(self) -> None:
        self.problems = [self._tokens(400) for _ in self._units(4)]
        # A list is built from left to right: the hint is drawn before those below it.
        self.thoughts = [
            [
                Thought(self._tokens(20), [self._tokens(20) for _ in range(self.WIDTH)])
                for _ in range(self.WIDTH)
            ]
            for _ in self.problems
        ]
        self._below: dict[str, list[Tokens]] = {}

    def start(self) -> list[Request]:
        requests = []
        for number, problem in enumerate(self.problems):
            for branch, thought in enumerate(self.thoughts[number]):
                name = f"q{number}b{branch}"
                self._below[name] = thought.next
                requests.append(Request(name, problem + thought.hint, self.WANTED))
        return requests

    def answered(self, request: Request, reply: Tokens) -> list[Request]:
        return [
            Request(f"{request.name}k{branch}", request.prompt + reply + hint, self.WANTED)
            for branch, hint in enumerate(self._below.get(request.name, []))
        ]


class NothingShared(Workload):
    name = "W4"
    describe = "nothing shared: 32 prompts of 256 tokens, 64 out"
    WANTED = 64

    def _draw(self) -> None:
        self.prompts = [self._tokens(256) for _ in self._units(32)]

    def start(self) -> list[Request]:
        return [Request(f"r{i}", prompt, self.WANTED) for i, prompt in enumerate(self.prompts)]


class LongDocuments(Workload):
    name = "W5"
    describe = "long documents: 6 questions of 30 tokens on each of 4 documents of 4,000, 16 out"
    WANTED = 16
    QUESTIONS = 6

    def _draw(self) -> None:
        self.documents = [self._tokens(4000) for _ in self._units(4)]
        # By question, then by document: this is also the order in which they are asked.
        self.questions = [[self._tokens(30) for _ in self.documents] for _ in range(self.QUESTIONS)]

    def start(self) -> list[Request]:
        return [
            Request(f"d{d}q{q}", document + self.questions[q][d], self.WANTED)
            for q in range(self.QUESTIONS)
            for d, document in enumerate(self.documents)
        ]


WORKLOADS: dict[str, type[Workload]] = {
    kind.name: kind for kind in (FewShot, Chat, TreeSearch, NothingShared, LongDocuments)
}
