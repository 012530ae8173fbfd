"""The KV cache as data: a pool of blocks and a radix tree of what they hold. NumPy only.

`pool` counts references to blocks, `tree` (of `node`s) says which tokens they hold. `eviction` is
the queue of what can be given up, in the order of one of `policies`; `programs` tells those apart
that still run. `pins` holds prefixes on purpose, `expiry` forgets them after a time. `evicted`
remembers what was given up lately. `check` recomputes every invariant.
"""

from rootlace.runtime.cache.block_pool import BlockPool, PoolExhausted
from rootlace.runtime.cache.miss_report import Cause, Evicted
from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.policies import policy_named
from rootlace.runtime.cache.radix_tree import RadixTree, check_cache
from rootlace.runtime.cache.retention import MAX_PINS, Expiry, Pin, Pins

__all__ = [
    "MAX_PINS",
    "BlockPool",
    "Cause",
    "Evicted",
    "Expiry",
    "Node",
    "Pin",
    "Pins",
    "PoolExhausted",
    "RadixTree",
    "check_cache",
    "policy_named",
]
