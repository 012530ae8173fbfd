"""The sampler of a device: what rows ask for becomes arrays, what is done with them launches.

It is the same function of logits and rows as `sampler`, which is the CPU's. Nothing here waits for
the device: what depends on a token yet to be found (`SampleRow.source`) is worked out there, the
step of the row's automaton among it.

Steps without lists (biases, bans, penalties) are launched alike for all rows of a kind, so that a
captured graph serves them: masks cost a bit per logit read, and no pass of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.interface import AutomatonTables, Choice, LogitEdits, PickRows
from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.sampling.automaton_arena import ARENA_BYTES, AutomatonArena
from rootlace.runtime.model.sampling.edit_lists import EditLists
from rootlace.wire.protocol import SamplingParams

_RANDOM, _CUT, _LISTS, _LOGPROBS = 1, 2, 4, 8
_MAX_KNOWN = 4096

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
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True)
class DeviceSamplingPlan:
    """See `step_sampler.SamplingPlan`. All of it but `arrays` says what is launched."""

    arrays: dict[str, np.ndarray]
    choice: Choice
    logprobs: bool
    tables: AutomatonTables | None
    """None: no row has a mask."""
    generation: int
    lists: bool

    @property
    def kind(self) -> Hashable | None:
        if self.lists:
            return None  # their lengths differ from step to step
        return self.choice, self.logprobs, self.generation if self.tables is not None else None


class DeviceSampler:
    """See `step_sampler.StepSampler`. Not thread-safe."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        kernels: KernelSet,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        """Allocates `arena_bytes` on the device, for constraints."""
        # Twice the masks that one step may have of its own.
        least = 4 * max_rows * 4 * (-(-vocab_size // 32))
        self.arena = AutomatonArena(vocab_size, device, max(arena_bytes, least))
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._lists = EditLists(vocab_size)
        self._neutral = self._record(SamplingParams(temperature=0.0, seed=0))
        self._known: dict[int, tuple[SamplingParams, bytes]] = {}

    # ------------------------------------------------------------ on the host

    def plan(self, rows: Sequence[SampleRow], count: int) -> DeviceSamplingPlan:
        """For `count` rows, of which those behind the given ones are empty: greedy, and allowed
        everything. To be called where the step is launched: masks and automata that are not on the
        device yet are sent there.

        Raises RuntimeError if a row's mask is not filled.
        """
        records = self._records(rows, count)
        flags = int(np.bitwise_or.reduce(records["flags"])) if count else 0
        arrays = {name: records[name] for name in _PARAMETERS}
        arrays["position"] = np.zeros(count, np.int64)
        arrays["position"][: len(rows)] = [row.position for row in rows]
        masked = any(row.mask is not None or row.automaton is not None for row in rows)
        if masked:
            arrays |= self._constraints(rows, count)
        banned = any(row.banned for row in rows)
        lists = banned or bool(flags & _LISTS)
        if lists:
            arrays |= self._lists.arrays(rows, count)
        choice: Choice = "cut" if flags & _CUT else "random" if flags & _RANDOM else "greedy"
        return DeviceSamplingPlan(
            arrays=arrays,
            choice=choice,
            logprobs=bool(flags & _LOGPROBS),
            tables=self.arena.tables if masked else None,
            generation=self.arena.generation,
            lists=lists,
        )

    def plan_like(self, plan: DeviceSamplingPlan, count: int) -> DeviceSamplingPlan:
        """For `count` empty rows, launched as `plan` is, which has no lists."""
        arrays = self.plan([], count).arrays
        if plan.tables is not None:
            none = np.full(count, -1, np.int32)
            arrays |= dict.fromkeys(("state", "source", "mask_row"), none)
        return replace(plan, arrays=arrays)

    def _constraints(self, rows: Sequence[SampleRow], count: int) -> dict[str, np.ndarray]:
        """Where the rows' automata stand, whose tokens step them first, and masks of the rest."""
        state, source, mask = np.full((3, count), -1, np.int32)
        arena = self.arena
        arena.begin_step()
        for index, row in enumerate(rows):
            if row.mask is not None:
                mask[index] = arena.mask(row.mask)
            elif row.automaton is not None:
                state[index] = arena.state(row.automaton)
                source[index] = row.source
        arena.flush()
        return {"state": state, "source": source, "mask_row": mask}

    def _records(self, rows: Sequence[SampleRow], count: int) -> np.ndarray:
        """Of each row's parameters; they are worked out once per request, not per step."""
        known = self._known
        parts = []
        for row in rows:
            params = row.params
            found = known.get(id(params))
            if found is None or found[0] is not params:
                if len(known) >= _MAX_KNOWN:
                    known.clear()
                found = known[id(params)] = params, self._record(params)
            parts.append(found[1])
        parts += [self._neutral] * (count - len(parts))
        return np.frombuffer(b"".join(parts), _RECORD)

    def _record(self, params: SamplingParams) -> bytes:
        top_k = min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        flags = 0
        if params.temperature > 0:
            flags |= _RANDOM
            if top_k < self._vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= _CUT
        if self._lists.wanted(params):
            flags |= _LISTS
        if params.logprobs:
            flags |= _LOGPROBS
        seed = (params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
        seed -= (seed >> 63) << 64
        values = (params.temperature, params.top_p, params.min_p, seed, top_k, flags)
        return np.array([values], _RECORD).tobytes()

    # ------------------------------------------------------------ on the device

    def run(
        self,
        plan: DeviceSamplingPlan,
        logits: torch.Tensor,
        arrays: dict[str, torch.Tensor],
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> None:
        """logits float32 or bfloat16 [count, V], not changed -> the first `count` of `tokens`
        int32 and, where a row asks for it, of `logprobs` float32. Only launches: may be captured.
        """
        count = len(logits)
        table = rows = None
        if plan.tables is not None:
            _, rows = self._kernels.step_automata(
                arrays["state"], arrays["source"], tokens, arrays["mask_row"], plan.tables
            )
            table = plan.tables.masks
        edited = logits
        if plan.lists:
            edits = LogitEdits(mask_table=table, mask_row=rows, **self._lists.bound(arrays))
            edited = self._kernels.edit_logits(logits, edits)
            table = rows = None
        picked = PickRows(
            **{name: arrays[name] for name in _PARAMETERS},
            position=arrays["position"],
            mask_table=table,
            mask_row=rows,
        )
        self._kernels.pick_tokens(edited, picked, plan.choice, tokens[:count])
        if plan.logprobs:
            self._kernels.token_logprobs(logits, tokens[:count], logprobs[:count])
