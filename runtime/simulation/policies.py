"""The policies that can be simulated, by name: of scheduling, and of eviction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from rootlace.runtime.config import CacheConfig, Eviction, Policy, SchedulerConfig

UNBOUNDED = 1 << 60


class BadPolicy(ValueError):
    """No such policy; the message says which there are."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy of the scheduler, how often it lets a request be overtaken, and what is evicted."""

    name: str
    policy: Policy
    max_overtaken: int
    max_delay: float
    eviction: Eviction


def parse_policy(text: str) -> NamedPolicy:
    """`POLICY` as the scheduler has it by default, `POLICY-no-aging` (nothing bounds how often a
    request is overtaken), `POLICY:N` (by N later requests at most) or `POLICY:N:X` (or by more that
    delay it by X of the work before it). `+EVICTION` behind it names another eviction policy than
    the cache's default."""
    config = SchedulerConfig()
    order, plus, evicted = text.partition("+")
    evictions: dict[str, Eviction] = {name: name for name in get_args(Eviction)}
    eviction = evictions.get(evicted) if plus else CacheConfig().eviction
    for policy in get_args(Policy):
        limits = None
        found = re.fullmatch(r"(\w+):(\d+)(?::(\d+(?:\.\d+)?))?", order, re.ASCII)
        if order == policy:
            limits = config.max_overtaken, config.max_delay
        elif order == f"{policy}-no-aging" and policy != "fcfs":
            limits = UNBOUNDED, 0.0
        elif found is not None and found[1] == policy:
            limits = int(found[2]), float(found[3] or 0)
        if limits is not None and eviction is not None:
            return NamedPolicy(text, policy, *limits, eviction)
    known = ", ".join(policy.name for policy in all_policies())
    raise BadPolicy(
        f"there is no policy {text!r}; there are {known}, and "
        "POLICY:MAX_OVERTAKEN[:MAX_DELAY][+EVICTION]"
    )


def all_policies() -> list[NamedPolicy]:
    """Every order of scheduling, and every other eviction beside the default order."""
    names = [*get_args(Policy), *(f"{p}-no-aging" for p in get_args(Policy) if p != "fcfs")]
    order, default = SchedulerConfig().policy, CacheConfig().eviction
    names += [f"{order}+{name}" for name in get_args(Eviction) if name != default]
    return [parse_policy(name) for name in names]
