"""What a world finds wrong, and what it was told."""

from __future__ import annotations

from dataclasses import dataclass


class Violation(AssertionError):
    """Something that was promised did not hold."""


@dataclass(frozen=True)
class Pinned:
    """What a client was told is pinned: from `sent` on, for longer than a world lives."""

    id: str
    sent: float
    told: float
