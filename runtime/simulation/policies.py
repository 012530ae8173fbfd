"""The policies that can be simulated, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from rootlace.runtime.config import Policy, SchedulerConfig

UNBOUNDED = 1 << 60


class BadPolicy(ValueError):
    """No such policy; the message says which there are."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy of the scheduler and how often it lets a request be overtaken."""

    name: str
    policy: Policy
    max_overtaken: int


def parse_policy(text: str) -> NamedPolicy:
    """`POLICY`, `POLICY-no-aging` (nothing bounds how often a request is overtaken) or `POLICY:N`
    (N later requests at most)."""
    default = SchedulerConfig().max_overtaken
    for policy in get_args(Policy):
        if text == policy:
            return NamedPolicy(text, policy, default)
        if text == f"{policy}-no-aging" and policy != "fcfs":
            return NamedPolicy(text, policy, UNBOUNDED)
        head, colon, number = text.partition(":")
        if head == policy and colon and number.isascii() and number.isdigit():
            return NamedPolicy(text, policy, int(number))
    known = ", ".join(policy.name for policy in all_policies())
    raise BadPolicy(f"there is no policy {text!r}; there are {known}, and POLICY:MAX_OVERTAKEN")


def all_policies() -> list[NamedPolicy]:
    names = [*get_args(Policy), *(f"{p}-no-aging" for p in get_args(Policy) if p != "fcfs")]
    return [parse_policy(name) for name in names]
