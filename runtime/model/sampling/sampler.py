"""The sampler: what a step's rows ask for becomes arrays, which a set of kernels samples by.

Host work and launches are apart. `plan` makes the arrays; `run` only applies operations of the
kernels (`edit_logits`, `pick_tokens`, `token_logprobs`, all specified in `kernels/reference`). On a
device that runs beside the host, nothing in `run` waits: what depends on a token yet to be found
(`SampleRow.source`) is worked out there, the step of the row's automaton among it; and steps
without lists are launched alike for all rows of a kind, so that a captured graph serves them. On
the host, `sample` does both at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch

from rootlace.kernels import KernelSet
from rootlace.kernels.interface import AutomatonTables, Choice, LogitEdits, PickRows
from rootlace.runtime.contracts.plan import SampleRow
from rootlace.runtime.model.sampling.row_arrays import LISTED, RowArrays

_EDITS = tuple(field.name for field in fields(LogitEdits) if not field.name.startswith("mask"))
_PICK = tuple(field.name for field in fields(PickRows) if not field.name.startswith("mask"))


class Constraints(Protocol):
    """Where masks lie that kernels read. There are two ways: main memory, where a step's masks are
    one table (`HostMasks`), and a device, where they stay between steps together with the automata
    that it steps by itself (`AutomatonArena`)."""

    @property
    def bans(self) -> bool:
        """Whether a row's banned tokens are taken out of its mask."""

    @property
    def tables(self) -> AutomatonTables | None:
        """What masks are rows of; None: `arrays` has the table."""

    @property
    def generation(self) -> int:
        """How often `tables` were replaced by larger ones."""

    def arrays(self, rows: Sequence[SampleRow], count: int) -> dict[str, np.ndarray]:
        """For `count` rows, of which those behind the given ones are allowed everything:
        `mask_row`, -1 for no mask, and either `mask_table` or, for `step_automata`, `state` and
        `source`. Raises RuntimeError if a row's mask is not filled."""


@dataclass(frozen=True)
class SamplingPlan:
    """Host work of sampling the rows of one step. `arrays` are what is read on the device; all
    else says what is launched."""

    arrays: dict[str, np.ndarray]
    choice: Choice
    logprobs: bool
    lists: bool
    masked: bool
    tables: AutomatonTables | None
    generation: int

    @property
    def kind(self) -> Hashable | None:
        """Plans of one kind, and for one number of rows, are launched alike on arrays of equal
        shapes: what was captured for one serves the others. None: not to be captured."""
        if self.lists:
            return None  # their lengths differ from step to step
        return self.choice, self.logprobs, self.generation if self.masked else None


class Sampler:
    """Samples one token per row. Not thread-safe."""

    def __init__(self, vocab_size: int, kernels: KernelSet, constraints: Constraints) -> None:
        self._kernels = kernels
        self._constraints = constraints
        self._rows = RowArrays(vocab_size)

    def plan(self, rows: Sequence[SampleRow], count: int) -> SamplingPlan:
        """For `count` rows, of which those behind the given ones are empty. To be called where the
        step is launched: masks and automata that are not on the device yet are sent there.

        Raises RuntimeError if a row's mask is not filled.
        """
        constraints = self._constraints
        asked = self._rows.of(rows, count, not constraints.bans)
        arrays = asked.arrays
        masked = any(
            row.mask is not None or row.automaton is not None or (constraints.bans and row.banned)
            for row in rows
        )
        if masked:
            arrays |= constraints.arrays(rows, count)
        return SamplingPlan(
            arrays=arrays,
            choice=asked.choice,
            logprobs=asked.logprobs,
            lists=asked.lists,
            masked=masked,
            tables=constraints.tables,
            generation=constraints.generation,
        )

    def plan_like(self, plan: SamplingPlan, count: int) -> SamplingPlan:
        """For `count` empty rows, launched as `plan` is, which is of a kind."""
        arrays = self._rows.of([], count, bans=False).arrays
        if plan.masked:
            arrays |= self._constraints.arrays([], count)
        return replace(plan, arrays=arrays)

    def run(
        self,
        plan: SamplingPlan,
        logits: torch.Tensor,
        arrays: dict[str, torch.Tensor],
        tokens: torch.Tensor,
        logprobs: torch.Tensor | None = None,
    ) -> None:
        """logits float32 or bfloat16 [count, V], not changed -> the first `count` of `tokens` int32
        (-1: the row has no distribution) and, where a row asks for it, of `logprobs` float32.

        Before, `tokens` holds what the step before found: `SampleRow.source` is an index into it.
        Only launches: may be captured.
        """
        count = len(logits)
        table, rows = self._masks(plan, arrays, tokens)
        edited = logits
        if plan.lists:
            lists = {name: arrays[name] for name in _EDITS if name in arrays}
            edits = LogitEdits(mask_table=table, mask_row=rows, **lists)
            edited = self._kernels.edit_logits(logits, edits)
            table = rows = None
        drawn = {name: arrays[name] for name in _PICK}
        picked = PickRows(mask_table=table, mask_row=rows, **drawn)
        self._kernels.pick_tokens(edited, picked, plan.choice, tokens[:count])
        if plan.logprobs and logprobs is not None:
            self._kernels.token_logprobs(logits, tokens[:count], logprobs[:count])

    def _masks(
        self, plan: SamplingPlan, arrays: dict[str, torch.Tensor], tokens: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(table of masks, each row's place in it)."""
        if not plan.masked:
            return None, None
        if plan.tables is None:
            return arrays["mask_table"], arrays["mask_row"]
        _, rows = self._kernels.step_automata(
            arrays["state"], arrays["source"], tokens, arrays["mask_row"], plan.tables
        )
        return plan.tables.masks, rows

    # ------------------------------------------------------------ on the host

    def takes_best(self, rows: Sequence[SampleRow]) -> bool:
        """Whether each row asks for nothing but the best token that its mask and its bans leave,
        and for no score of it."""
        flags = self._rows.flags
        return all(not row.params.logprobs if row.simple else not flags(row.params) for row in rows)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> np.ndarray:
        """`plan` and `run` at once: logits float32 [len(rows), V], not changed -> int32.

        Logits that a row's mask excludes may be anything, unless the row has biases or penalties.
        """
        flags = self._rows.flags
        listed = [bool(flags(row.params) & LISTED) for row in rows]
        if all(listed) or not any(listed):
            return self._sample(logits, rows)
        # Apart, since edits copy logits.
        tokens = np.empty(len(rows), np.int32)
        for kind in (False, True):
            chosen = [i for i, its in enumerate(listed) if its == kind]
            tokens[chosen] = self._sample(logits[chosen], [rows[i] for i in chosen])
        return tokens

    def _sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> np.ndarray:
        plan = self.plan(rows, len(rows))
        arrays = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
        tokens = torch.empty(len(rows), dtype=torch.int32)
        self.run(plan, logits, arrays, tokens)
        return tokens.numpy()
