"""Eviction policies, one module each, named as in `CacheConfig.eviction`.

A module defines `Policy`, made with the tree's `Programs`, with the methods of
`cache.eviction.EvictionPolicy`. To add a policy, write its module and add its name to
`config.Eviction`: the tests of the tree and of the scheduler run with every name there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from rootlace.runtime.cache.eviction import EvictionPolicy
from rootlace.runtime.cache.node import Programs


def policy_named(name: str) -> Callable[[Programs], EvictionPolicy]:
    """The policy of a name. Raises ValueError if unknown."""
    try:
        module = import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no eviction policy {name!r}") from error
    policy: Callable[[Programs], EvictionPolicy] = module.Policy
    return policy
