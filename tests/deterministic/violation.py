"""What a world finds wrong, and what it was told."""

from collections.abc import Hashable
from dataclasses import dataclass


class Violation(AssertionError):
    """Something that was promised did not hold."""


@dataclass(frozen=True)
class Pinned:
    """What a client was told is pinned: from `sent` on, for longer than a world lives."""

    id: str
    sent: float
    told: float


@dataclass(frozen=True)
class Held:
    """Tokens that an operation computed in a namespace; with `grows` it generated some behind."""

    op: object
    namespace: Hashable
    tokens: list[int]
    grows: bool


@dataclass(frozen=True)
class Found:
    """How much of a prompt an operation was told to be cached in its namespace."""

    op: object
    namespace: Hashable
    prompt: list[int]
    cached: int
