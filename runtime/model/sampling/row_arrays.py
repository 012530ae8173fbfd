"""What rows ask for, as arrays: how their tokens are drawn, and what changes their logits first.

The arrays are those of `PickRows` and `LogitEdits`, for every set of kernels alike. A sampling
parameter that acts on logits (`rootlace.wire.sampling` describes it) and has a field of its name
there becomes an array by itself. Masks are apart (`sampler.Constraints`): where they lie depends on
what the kernels read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from rootlace.kernels.interface import Choice, LogitEdits, PickRows
from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.sampling.edit_lists import EditLists
from rootlace.wire.sampling import PARAMETERS, Parameter, SamplingParams

DRAWN, CUT, BIASED, PENALISED, LOGPROBS = 1, 2, 4, 8, 16
"""What a request asks for, as bits of `flags`."""
LISTED = BIASED | PENALISED
MAX_REQUESTS = 4096


def _given_to(kernel_arguments: type) -> tuple[Parameter, ...]:
    """The parameters that act on logits by a number per row."""
    known = {field.name for field in fields(kernel_arguments)}
    return tuple(p for p in PARAMETERS.values() if p.acts == "logits" and p.name in known)


DRAWS, PENALTIES = _given_to(PickRows), _given_to(LogitEdits)
"""Neutral at their defaults, but for the temperature, which is neutral (greedy) at 0."""

# Float32 logits are divided by it.
_TYPES = {"repetition_penalty": np.float32}
_RECORD = np.dtype(
    [
        *(
            (p.name, _TYPES.get(p.name, np.float64 if p.type is float else np.int32))
            for p in (*DRAWS, *PENALTIES)
        ),
        ("seed", np.int64),
        ("flags", np.int32),
    ],
    align=True,
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
    """Makes these arrays. Not thread-safe."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lists = EditLists(vocab_size)
        self._neutral = self._record(SamplingParams(temperature=0.0, seed=0))[0]
        self._known: dict[int, tuple[SamplingParams, bytes, int]] = {}

    def of(self, rows: Sequence[SampleRow], count: int, bans: bool) -> Asked:
        """For `count` rows, of which those behind the given ones are empty: greedy, and with their
        logits as they are. `bans`: banned tokens are listed; they are not in the masks."""
        records, flags = self._records(rows, count)
        arrays = {p.name: records[p.name] for p in DRAWS}
        arrays["seed"] = records["seed"]
        positions = [len(row.token_ids) + (row.source >= 0) for row in rows]
        arrays["position"] = np.array(positions + [0] * (count - len(rows)), np.int64)
        biased = bool(flags & BIASED) or (bans and any(row.banned for row in rows))
        if biased:
            arrays |= self._lists.biases(rows, count, bans)
        if flags & PENALISED:
            arrays |= self._lists.seen(rows, records["flags"] & PENALISED, count)
            arrays |= {p.name: records[p.name] for p in PENALTIES}
        lists = biased or bool(flags & PENALISED)
        choice: Choice = "cut" if flags & CUT else "random" if flags & DRAWN else "greedy"
        return Asked(arrays, choice, bool(flags & LOGPROBS), lists)

    def _records(self, rows: Sequence[SampleRow], count: int) -> tuple[np.ndarray, int]:
        """([count]: each row's parameters, by name, and its `flags`; what any of them asks for).
        They are worked out once per request, not per step."""
        parts, asked = [self._neutral] * count, 0
        for i, row in enumerate(rows):
            _, parts[i], flags = self._of(row.params)
            asked |= flags
        return np.frombuffer(bytearray().join(parts), _RECORD), asked

    def flags(self, params: SamplingParams) -> int:
        """What a request asks for."""
        return self._of(params)[2]

    def _of(self, params: SamplingParams) -> tuple[SamplingParams, bytes, int]:
        known = self._known
        found = known.get(id(params))
        if found is None or found[0] is not params:
            if len(known) >= MAX_REQUESTS:
                known.clear()
            found = known[id(params)] = params, *self._record(params)
        return found

    def _record(self, params: SamplingParams) -> tuple[bytes, int]:
        """(the request's record, its flags)"""
        draws = [self._value(p, getattr(params, p.name)) for p in DRAWS]
        penalties = [self._value(p, getattr(params, p.name)) for p in PENALTIES]
        flags = 0
        if params.temperature > 0:
            flags |= DRAWN
            cuts = zip(DRAWS, draws, strict=True)
            if any(p.name != "temperature" and v != self._value(p, p.default) for p, v in cuts):
                flags |= CUT
        if params.logit_bias:
            flags |= BIASED
        if any(v != p.default for p, v in zip(PENALTIES, penalties, strict=True)):
            flags |= PENALISED
        if params.logprobs:
            flags |= LOGPROBS
        seed = (params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
        seed -= (seed >> 63) << 64
        return np.array([(*draws, *penalties, seed, flags)], _RECORD).tobytes(), flags

    def _value(self, parameter: Parameter, value: float) -> float:
        """What kernels are told: of a number of tokens, at most how many there are (off)."""
        if parameter.type is not int:
            return value
        return min(value, self._vocab_size) if value > 0 else self._vocab_size
