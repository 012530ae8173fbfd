"""The policies that can be simulated, by name."""

from __future__ import annotations

import re
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
    max_delay: float


def parse_policy(text: str) -> NamedPolicy:
    """`POLICY` as the scheduler has it by default, `POLICY-no-aging` (nothing bounds how often a
    request is overtaken), `POLICY:N` (by N later requests at most) or `POLICY:N:X` (or by more that
    delay it by X of the work before it)."""
    config = SchedulerConfig()
    for policy in get_args(Policy):
        if text == policy:
            return NamedPolicy(text, policy, config.max_overtaken, config.max_delay)
        if text == f"{policy}-no-aging" and policy != "fcfs":
            return NamedPolicy(text, policy, UNBOUNDED, 0.0)
        found = re.fullmatch(r"(\w+):(\d+)(?::(\d+(?:\.\d+)?))?", text, re.ASCII)
        if found is not None and found[1] == policy:
            return NamedPolicy(text, policy, int(found[2]), float(found[3] or 0))
    known = ", ".join(policy.name for policy in all_policies())
    raise BadPolicy(
        f"there is no policy {text!r}; there are {known}, and POLICY:MAX_OVERTAKEN[:MAX_DELAY]"
    )


def all_policies() -> list[NamedPolicy]:
    names = [*get_args(Policy), *(f"{p}-no-aging" for p in get_args(Policy) if p != "fcfs")]
    return [parse_policy(name) for name in names]
