"""Scenarios of worlds as data: programs of clients, faults, and the shape of the world.

A scenario is drawn from a seed. It can be written as JSON, and any part of it can be left out:
actions on a branch that was not opened are skipped.
"""

import random
from typing import Any

import msgspec

from rootlace.runtime.contracts.block_store import TransferKind

Action = tuple[Any, ...]
"""Verb and its arguments; branches have numbers of their program."""


class Program(msgspec.Struct, frozen=True):
    """Actions of one client from second `start` on, in order; `wait`, `sleep` and `cancel` let time
    pass."""

    client: int
    start: float
    actions: tuple[Action, ...]


class Fault(msgspec.Struct, frozen=True):
    """A fault at second `at`; `kind` is a method of `faults.Faults`."""

    at: float
    kind: str
    value: float = 0.0


class Shape(msgspec.Struct, frozen=True):
    """Shape of a world."""

    clients: int = 6
    blocks: int = 60
    block_size: int = 4
    step_tokens: int = 64
    running: int = 16
    overlap: bool = False
    eviction: str = "lru"
    policy: str = "lpm"
    split: float = 0.1
    replicas: int = 1
    prefill: int = 0
    """Number of replicas that compute prompts for the others."""
    by: TransferKind = "memory"
    """... and hand them over by a memory of all of them, or of each."""
    disk: int = 0
    """Slots of the disk below each engine's pool."""
    state: bool = False
    """Whether the gateway keeps programs' state (`--state`)."""


class Scenario(msgspec.Struct, frozen=True):
    seed: int
    shape: Shape
    programs: tuple[Program, ...]
    faults: tuple[Fault, ...] = ()

    @property
    def size(self) -> int:
        return sum(len(program.actions) for program in self.programs) + len(self.faults)


SYSTEM = (
    "the cat and the blue cat name the age of the green tree.",
    "a red cat. the age is 23, and the name is bea ",
    "yes the end and on and on, ",
)
WORDS = ("the", " cat", " and", " 23", "éa", " name", "ing", " t", "he ", ".", " yes", "{", "1")
FAULTS = (
    *("kill",) * 3,
    *("die",) * 4,
    *("suspend", "stick"),
    *("fail",) * 2,
    *("slow",) * 3,
    *("cut",) * 4,
    *("darken", "vanish", "block", "lag", "lag"),
    *("gateway", "jump"),
)
LOSSES = ("gateway", "gateway", "cut", "darken", "block", "fill")
"""Faults that happen more often in worlds with pauses only."""


def draw(seed: int, programs: int = 60) -> Scenario:
    """Draw the scenario of a seed."""
    dice = random.Random(seed)
    state = random.Random(f"state {seed}")
    keeps = state.random() < 0.4
    clients = dice.randint(2, 8)
    replicas = random.Random(f"replicas {seed}").choice((1, 1, 2, 3))
    apart = random.Random(f"prefill {seed}").randrange(2)
    shape = Shape(
        clients=clients,
        blocks=dice.choice((32, 40, 60, 200)),
        step_tokens=dice.choice((16, 64, 256)),
        running=dice.choice((3, 8, 32)),
        overlap=dice.random() < 0.4,
        eviction=dice.choice(("lru", "lfuda")),
        policy=dice.choice(("lpm", "fcfs", "dfs")),
        split=dice.choice((0.0, 0.2, 0.7)),
        replicas=replicas,
        prefill=min(apart, replicas - 1),
        by=random.Random(f"transfer {seed}").choice(("memory", "tcp")),
        state=keeps,
    )
    seconds = programs / dice.choice((3.0, 10.0, 30.0))
    # A restart takes a second or two, so faults that should meet it are spread out.
    drawn = tuple(
        Program(dice.randrange(clients), round(dice.uniform(0, seconds), 4), actions(dice))
        for _ in range(programs)
    )
    count = dice.choice((0, 1, 2, 3, 5, 8))
    faults = tuple(
        Fault(round(dice.uniform(0, seconds), 4), dice.choice(FAULTS), round(dice.random(), 6))
        for _ in range(count)
    )
    if keeps:
        faults += tuple(
            Fault(round(state.uniform(0, seconds), 4), state.choice(LOSSES), state.random())
            for _ in range(state.randint(0, 4))
        )
    return Scenario(seed, shape, drawn, faults)


def actions(dice: random.Random) -> tuple[Action, ...]:
    """Draw one program: it opens branches, extends, forks, joins and closes them."""
    found: list[Action] = []
    branches = [1]
    options = {"program": "p"} if dice.random() < 0.5 else {}
    if dice.random() < 0.1:
        options["namespace"] = "other"
    elif dice.random() < 0.05:
        options["share"] = False
    found.append(("open", 1, None, options))
    if dice.random() < 0.8:
        found.append(("append", 1, (("text", dice.choice(SYSTEM)),)))
    for _ in range(dice.randint(2, 12)):
        branch = dice.choice(branches)
        verb = dice.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
        if verb == "open":
            child = len(branches) + 1
            found.append(("open", child, branch, {}))
            branches.append(child)
        elif verb == "append":
            found.append(("append", branch, _parts(dice, branches, branch)))
        elif verb == "generate":
            found.append(("generate", branch, _generate(dice)))
        elif verb == "select":
            choices = tuple(dict.fromkeys(_text(dice, 3) for _ in range(dice.randint(2, 3))))
            found.append(("select", branch, choices))
        elif verb == "sleep":
            found.append(("sleep", round(dice.choice((0.001, 0.01, 0.1, 1.0)) * dice.random(), 5)))
        elif verb == "status":
            found.append((dice.choice(("status", "ping", "flush", "unpin")),))
        else:
            found.append((verb, branch))
    if dice.random() < 0.9:
        found += [("close", branch) for branch in branches]
    return tuple(found)


_WEIGHTS = {
    "append": 22,
    "generate": 24,
    "open": 14,
    "select": 6,
    "prefill": 5,
    "explain": 3,
    "wait": 10,
    "sleep": 6,
    "cancel": 3,
    "close": 3,
    "status": 4,
}


def _text(dice: random.Random, words: int) -> str:
    return "".join(dice.choice(WORDS) for _ in range(dice.randint(1, words)))


def _parts(dice: random.Random, branches: list[int], branch: int) -> tuple[Any, ...]:
    parts: list[tuple[Any, ...]] = []
    for _ in range(dice.choice((1, 1, 2))):
        kind = dice.random()
        if kind < 0.75:
            parts.append(("text", _text(dice, 6)))
        elif kind < 0.85:
            parts.append(("tokens", tuple(dice.randrange(30, 90) for _ in range(3))))
        elif kind < 0.95 and len(branches) > 1:
            parts.append(("quote", dice.choice([b for b in branches if b != branch])))
        elif kind > 0.996:
            parts.append((dice.choice(("poison", "thorn")),))
        elif kind > 0.98:
            parts.append(("text", _text(dice, 6) * 60))  # exceeds the context
        else:
            parts.append(("text", "</s>"))
    return tuple(parts)


def _generate(dice: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"max_tokens": dice.choice((1, 2, 5, 12, 40))}
    if dice.random() < 0.5:
        found["temperature"] = 1.0
        if dice.random() < 0.8:
            found["seed"] = dice.randrange(1000)
    else:
        found["temperature"] = 0.0
    kind = dice.random()
    if kind < 0.25:
        found["constraint"] = dice.choices(
            ("word", "answer", "choices", "schema", "plain", "checked", "slow", "explodes"),
            (4, 6, 4, 6, 3, 6, 1, 0.5),
        )[0]
    elif kind < 0.4:
        found["stop"] = dice.choice(("e", "the", "a", "an", " c"))
    elif kind < 0.5:
        found["stop_token_ids"] = tuple(dice.randrange(60, 90) for _ in range(4))
        found["min_tokens"] = dice.choice((0, 2))
    if dice.random() < 0.15:
        found["n"] = dice.randint(2, 3)
    for name, chance in (("stream", 0.5), ("logprobs", 0.2), ("report", 0.05)):
        if dice.random() < chance:
            found[name] = True
    if dice.random() < 0.06:
        found["timeout"] = dice.choice((0.02, 0.2, 2.0))
    if dice.random() < 0.06:
        found["pin"] = dice.choice((True, "try"))
    if dice.random() < 0.1:
        found["priority"] = dice.randint(-2, 2)
    own = random.Random(f"{found}")  # a separate generator, so that other draws stay the same
    if own.random() < 0.2:
        found["prediction"] = _text(own, 12)
    return found
