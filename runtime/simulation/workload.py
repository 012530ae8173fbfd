"""A trace as the requests of one run: repeated, sped up, in units of several tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.simulation.trace import Trace

SHARED_BY = 0.01
"""A block that at least this part of a trace's requests begins with is shared by all its copies."""

FIRST_OUTPUT = 1 << 30
"""Units from here on are outputs: one id per request, so nothing ever matches them."""


@dataclass(frozen=True)
class Load:
    """How a trace is played.

    `rate` divides the time between arrivals. The trace is played `repeat` times, one after the
    other, or as often as `requests` takes; a copy begins one mean gap after the last arrival of the
    one before. Copies have their own blocks, but for those that at least 1 % of the trace's
    requests have (system prompts): these are the same ones in all copies. `granularity` is how many
    tokens a unit stands for: scheduler and tree count units where they otherwise count tokens.
    """

    rate: float = 1.0
    repeat: int = 1
    requests: int | None = None
    granularity: int = 16


class Workload:
    """The requests of a run, each made when it is asked for.

    Arrays over all requests: `arrivals` (seconds), `prompt_units`, `outputs` (tokens, at least 1).
    A prompt's units are rounded up. The first unit of a block has the block's number and the others
    are 0, so two prompts agree exactly as far as their blocks do.
    """

    def __init__(self, trace: Trace, load: Load) -> None:
        """Raises ValueError where the load does not fit the trace."""
        size = len(trace)
        if load.granularity < 1 or load.repeat < 1:
            raise ValueError("granularity and repeat must be positive")
        if not (math.isfinite(load.rate) and load.rate > 0):
            raise ValueError(f"the rate must be a positive number, not {load.rate}")
        if trace.format == "mooncake" and trace.block_tokens % load.granularity:
            raise ValueError(
                f"the granularity must divide the trace's blocks of {trace.block_tokens} tokens, "
                f"which {load.granularity} does not"
            )
        count = load.requests if load.requests is not None else size * load.repeat
        if count < 1:
            raise ValueError("at least one request is needed")
        self.trace = trace
        self.load = load
        self.granularity = load.granularity
        copies = -(-count // size)
        if copies * trace.num_blocks >= FIRST_OUTPUT or FIRST_OUTPUT + count >= 2**31 - 1:
            raise ValueError(f"{count} requests have more blocks than there are ids")
        self._block_units = -(-trace.block_tokens // load.granularity)
        span = float(trace.arrivals[-1]) * size / max(size - 1, 1)
        which = np.arange(count) // size
        within = np.arange(count) % size
        self.arrivals = (which * span + trace.arrivals[within]) / load.rate
        self.prompt_units = -(-trace.prompt_tokens // load.granularity)[within]
        self.outputs = np.maximum(trace.output_tokens, 1)[within]
        self._private = _private(trace)

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def output_units(self) -> np.ndarray:
        """The first unit is one token: it is there with the prompt's last one."""
        return 1 + -(-(self.outputs - 1) // self.granularity)

    def fitting(self, cache_units: int) -> np.ndarray:
        """Numbers of the requests that fit into a cache of `cache_units` units, alone and to their
        end. Their last unit needs no room: nothing comes after it."""
        return np.flatnonzero(self.prompt_units + self.output_units - 1 <= cache_units)

    def blocks(self, index: int) -> np.ndarray:
        """int64 ids of the blocks of request `index`."""
        copy, within = divmod(index, len(self.trace))
        span = slice(self.trace.starts[within], self.trace.starts[within + 1])
        blocks = self.trace.blocks[span]
        if not copy:
            return blocks
        return blocks + self._private[span] * (copy * self.trace.num_blocks)

    def prompt(self, index: int) -> np.ndarray:
        """int32 units of request `index`."""
        units = np.zeros(self.prompt_units[index], np.int32)
        units[:: self._block_units] = self.blocks(index) + 1
        return units

    def all_blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The blocks of all requests in one array, their sizes in units (both int32: there are
        many), and where each request starts there."""
        trace, size = self.trace, len(self.trace)
        counts = np.diff(trace.starts)
        units = np.full(len(trace.blocks), self._block_units, np.int32)
        units[trace.starts[1:] - 1] = (
            -(-trace.prompt_tokens // self.granularity) - (counts - 1) * self._block_units
        )
        copies = -(-len(self) // size)
        starts = np.concatenate(([0], np.cumsum(np.tile(counts, copies)[: len(self)])))
        shift = np.arange(copies, dtype=np.int32)[:, None] * (
            self._private * np.int32(trace.num_blocks)
        )
        shift += trace.blocks.astype(np.int32)
        blocks = shift.reshape(-1)[: starts[-1]]
        return blocks, np.tile(units, copies)[: starts[-1]], starts


def _private(trace: Trace) -> np.ndarray:
    """bool per entry of `trace.blocks`: whether a copy of the trace has a block of its own there.
    (No request has a block twice.)"""
    uses = np.bincount(trace.blocks)
    private: np.ndarray = (uses < max(SHARED_BY * len(trace), 2))[trace.blocks]
    return private
