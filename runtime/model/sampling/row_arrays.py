"""What rows ask for, as arrays: how their tokens are drawn, and what changes their logits first.

The arrays are those of `PickRows` and `LogitEdits`, for every set of kernels alike. Masks are apart
(`sampler.Constraints`): where they lie depends on what the kernels read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rootlace.kernels.interface import Choice
from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.sampling.edit_lists import EditLists
from rootlace.wire.protocol import SamplingParams

DRAWS = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Fields of `PickRows` that follow from a request's parameters alone."""
DRAWN, CUT, LISTED, LOGPROBS = 1, 2, 4, 8
"""What a request asks for, as bits of `flags`."""
MAX_REQUESTS = 4096

_RECORD = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.int64),
        ("top_k", np.int32),
        ("flags", np.int32),
    ]
)


@dataclass(frozen=True)
class Asked:
    """`arrays` differ in contents from step to step; what else it says decides what is launched."""

    arrays: dict[str, np.ndarray]
    choice: Choice
    logprobs: bool
    lists: bool
    """Whether some row has biases, bans or penalties: arrays whose lengths differ."""


class RowArrays:
    """Makes them. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lists = EditLists(vocab_size)
        self._neutral = self._record(SamplingParams(temperature=0.0, seed=0))
        self._known: dict[int, tuple[SamplingParams, bytes]] = {}

    def of(self, rows: Sequence[SampleRow], count: int, bans: bool) -> Asked:
        """For `count` rows, of which those behind the given ones are empty: greedy, and with their
        logits as they are. `bans`: banned tokens are listed; they are not in the masks."""
        records = self._records(rows, count)
        arrays = {name: records[name] for name in DRAWS}
        arrays["position"] = np.zeros(count, np.int64)
        arrays["position"][: len(rows)] = [row.position for row in rows]
        flags = int(np.bitwise_or.reduce(records["flags"])) if count else 0
        lists = bool(flags & LISTED) or (bans and any(row.banned for row in rows))
        if lists:
            arrays |= self._lists.arrays(rows, count, bans)
        choice: Choice = "cut" if flags & CUT else "random" if flags & DRAWN else "greedy"
        return Asked(arrays, choice, bool(flags & LOGPROBS), lists)

    def flags(self, rows: Sequence[SampleRow]) -> np.ndarray:
        """int32 [len(rows)]: what each row's request asks for."""
        flags: np.ndarray = self._records(rows, len(rows))["flags"]
        return flags

    def _records(self, rows: Sequence[SampleRow], count: int) -> np.ndarray:
        """Of each row's parameters; they are worked out once per request, not per step."""
        known = self._known
        parts = []
        for row in rows:
            params = row.params
            found = known.get(id(params))
            if found is None or found[0] is not params:
                if len(known) >= MAX_REQUESTS:
                    known.clear()
                found = known[id(params)] = params, self._record(params)
            parts.append(found[1])
        parts += [self._neutral] * (count - len(parts))
        return np.frombuffer(bytearray().join(parts), _RECORD)

    def _record(self, params: SamplingParams) -> bytes:
        top_k = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        flags = 0
        if params.temperature > 0:
            flags |= DRAWN
            if top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= CUT
        if self._lists.wanted(params):
            flags |= LISTED
        if params.logprobs:
            flags |= LOGPROBS
        seed = (params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
        seed -= (seed >> 63) << 64
        values = (params.temperature, params.top_p, params.min_p, seed, top_k, flags)
        return np.array([values], _RECORD).tobytes()
