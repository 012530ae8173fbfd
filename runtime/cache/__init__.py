"""The KV cache as data: a pool of blocks and a radix tree of what they hold. NumPy only."""

from rootlace.runtime.cache.check import check_cache
from rootlace.runtime.cache.node import Node
from rootlace.runtime.cache.pool import BlockPool, PoolExhausted
from rootlace.runtime.cache.tree import RadixTree

__all__ = ["BlockPool", "Node", "PoolExhausted", "RadixTree", "check_cache"]
