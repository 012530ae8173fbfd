"""Faults that a world finds, and the facts that clients received."""

from collections.abc import Hashable
from dataclasses import dataclass


class Violation(AssertionError):
    """Raised for a broken promise."""


@dataclass(frozen=True)
class Pinned:
    """A pin reported to a client: valid from `sent` on, for longer than a world lives."""

    id: str
    sent: float
    told: float


@dataclass(frozen=True)
class Held:
    """Tokens that an operation computed in a namespace; with `grows`, generated tokens follow."""

    op: object
    namespace: Hashable
    tokens: list[int]
    grows: bool


@dataclass(frozen=True)
class Found:
    """Cached length of a prompt that an operation reported for its namespace."""

    op: object
    namespace: Hashable
    prompt: list[int]
    cached: int
