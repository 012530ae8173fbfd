"""Hold automata and packed masks for constraints, on the device at fixed places.

A captured graph reads tensors at the addresses of its capture. So each kind of table has one tensor
(`AutomatonTables`), allocated at the start, in which automata and masks come and go. An automaton
is uploaded at its first use; the least recently used one makes room. Copies are queued on the
device behind the steps launched before, whose tables thus stay valid.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rootlace.kernels.interface import AutomatonTables
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow, SampleRow, SteppedAutomaton

if TYPE_CHECKING:
    import torch

# Arena space --------------------------------------------------------------------------------------
#
# Allocate places in arrays of fixed length.


class Runs:
    """Allocator of neighbouring places in `tables`, each run at the lowest place where it fits."""

    def __init__(self, size: int, *tables: str) -> None:
        self.size = size
        self.tables = tables
        self._free = [(0, size)] if size else []  # ascending, no two touch

    def take(self, count: int) -> int | None:
        """Return the first of `count` free places; None: no gap is long enough."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= count:
                if stop - start == count:
                    del self._free[index]
                else:
                    self._free[index] = (start + count, stop)
                return start
        return None

    def give(self, start: int, count: int) -> None:
        self._insert(start, start + count)

    def grow(self, size: int) -> None:
        self._insert(self.size, size)
        self.size = size

    def _insert(self, start: int, stop: int) -> None:
        if start == stop:
            return
        index = bisect_left(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))


# Host masks ---------------------------------------------------------------------------------------
#
# Give masks to kernels that read main memory: single ones, or a step's as one table.
#
# A row's banned tokens are removed from its mask, which then excludes every forbidden token.


Mask = np.ndarray | MaskRow | None
"""Mask of allowed tokens; None: everything is allowed."""
MAX_BANS = 64
"""Number of masks of bans that are kept from step to step."""


class HostMasks:
    """Masks in main memory: see `sampler.Constraints`. Rows have no automata, only masks."""

    bans = True
    """Whether a row's banned tokens are removed from its mask."""
    generation = 0
    tables: AutomatonTables | None = None
    """Tables that masks are rows of; None: `arrays` has the table."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._bans: dict[tuple[int, ...], Mask] = {}

    def of(self, row: SampleRow) -> Mask:
        """Return the mask of the row's token. The array must not be changed. Raises RuntimeError if
        a mask that has to be read is not filled."""
        banned = row.banned
        if not banned:
            return row.mask
        if row.mask is not None:
            return self._without(row.mask, banned)
        # All steps of a request ban the same few tokens (stop tokens).
        found = self._bans.get(banned)
        if found is None:
            if len(self._bans) >= MAX_BANS:
                self._bans.clear()
            found = self._bans[banned] = self._without(None, banned)
        return found

    def arrays(self, rows: Sequence[SampleRow], count: int) -> dict[str, np.ndarray]:
        """Return `mask_table`, and `mask_row`: the places in the table for `count` rows, -1 for no
        mask. Rows behind the given ones allow everything. Raises RuntimeError if a row's mask is
        not filled."""
        words = self._words
        masks = [self.of(row) if row.banned else row.mask for row in rows]
        table = np.empty((max(len(rows), 1), words), np.int32)
        places = np.full(count, -1, np.int32)
        first: dict[int, int] = {}  # rows share a mask's place
        for at, mask in enumerate(masks):
            if mask is None:
                continue
            places[at] = place = first.setdefault(id(mask), at)
            if place < at:
                continue
            found = words_of(mask)
            if len(found) == words:
                table[at] = found
            else:
                table[at, : len(found)] = found[:words]
                table[at, len(found) :] = 0  # tokens beyond the mask are excluded
        return {"mask_table": table, "mask_row": places}

    def _without(self, mask: Mask, banned: Sequence[int]) -> Mask:
        banned = [token for token in banned if 0 <= token < self._vocab_size]
        if not banned:
            return mask
        if mask is None:
            found = np.full(self._words, -1, np.int32)
        else:
            found = np.zeros(self._words, np.int32)
            words = words_of(mask)[: self._words]
            found[: len(words)] = words
        octets = found.view(np.uint8)
        for token in banned:
            octets[token >> 3] &= 0xFF ^ (1 << (token & 7))
        return found


def words_of(mask: np.ndarray | MaskRow) -> np.ndarray:
    """Return the mask's words, int32. Raises RuntimeError for a table's row that is not filled."""
    if not isinstance(mask, MaskRow):
        return mask
    table = mask.table
    if not (mask.address or table.filled(mask.row)):
        raise RuntimeError(f"row {mask.row} of mask table {table.key} is not filled")
    return table.rows[mask.row]


# Automaton arena ----------------------------------------------------------------------------------


ARENA_BYTES = 128 << 20
"""Bytes of the arena: half for masks, a quarter for classes of tokens."""
DEAD_STATE = 0
NOTHING = 0
"""Mask that allows nothing."""


@dataclass
class _Resident:
    """Places of one automaton, or of one mask: `masks` anywhere; the others by first place and
    count."""

    masks: list[int] = field(default_factory=list)
    classes: tuple[int, int] = (0, 0)
    states: tuple[int, int] = (0, 0)
    steps: tuple[int, int] = (0, 0)


class AutomatonArena:
    """Masks and automata on a device: see `sampler.Constraints`. Not thread-safe. For each step:
    `begin_step`, then `state` and `mask` for its rows; then `flush` on the device's stream."""

    bans = False

    def __init__(
        self, vocab_size: int, device: torch.device | str, max_bytes: int = ARENA_BYTES
    ) -> None:
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        import torch

        self._device = torch.device(device)
        states = max(max_bytes // 16 // 12, 2)
        self._states = Runs(states, "mask_of", "class_row", "next_start")
        self._steps = Runs(max(max_bytes // 16 * 3 // 4, 2), "next_state")
        self._classes = Runs(max(max_bytes // 4 // (4 * vocab_size), 2), "token_class")
        self._masks = Runs(max(max_bytes // 2 // (4 * self._words), 2), "masks")
        self._tensors = {
            "mask_of": self._new(states),
            "class_row": self._new(states),
            "next_start": self._new(states),
            "next_state": self._new(self._steps.size),
            "token_class": self._new(self._classes.size, vocab_size),
            "masks": self._new(self._masks.size, self._words),
        }
        for space in (self._states, self._steps, self._classes, self._masks):
            space.take(1)  # for the dead state
        self._residents: OrderedDict[Hashable, _Resident] = OrderedDict()  # oldest use first
        self._in_use: set[Hashable] = set()
        self._private: list[int] = []
        # Data to upload: runs of places by their first one, and masks one by one.
        # The dead state comes first: it is uploaded on the stream that reads it.
        self._fresh: list[tuple[str, int, np.ndarray]] = [
            (name, 0, np.zeros((1, *tensor.shape[1:]), np.int32))
            for name, tensor in self._tensors.items()
            if name != "masks"
        ]
        self._fresh_masks: list[tuple[int, np.ndarray]] = [(NOTHING, np.empty(0, np.int32))]
        self.generation = 0
        """Number of times the tables have moved, because a step needed more room."""
        self.uploaded_bytes = 0

    def _new(self, *shape: int) -> torch.Tensor:
        import torch  # only here: masks in main memory need no torch

        return torch.empty(shape, dtype=torch.int32, device=self._device)

    @property
    def tables(self) -> AutomatonTables:
        return AutomatonTables(**self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    # ------------------------------------------------------------ a step

    def arrays(self, rows: Sequence[SampleRow], count: int) -> dict[str, np.ndarray]:
        """Return the arrays for `step_automata`, without a table: the states of the rows' automata,
        the rows whose tokens step them first, and masks of the other rows. Missing automata and
        masks are uploaded. See `HostMasks.arrays`."""
        state, source, mask = np.full((3, count), -1, np.int32)
        self.begin_step()
        for index, row in enumerate(rows):
            if row.mask is not None:
                mask[index] = self.mask(row.mask)
            elif row.automaton is not None:
                state[index] = self.state(row.automaton)
                source[index] = row.source
        self.flush()
        return {"state": state, "source": source, "mask_row": mask}

    def begin_step(self) -> None:
        """Begin a step: places of the step before may be reused."""
        self._in_use.clear()
        for place in self._private:
            self._masks.give(place, 1)
        self._private = []

    def state(self, at: AutomatonState) -> int:
        """Return the number of `at` among the states of all automata."""
        if at.state < 0:
            return DEAD_STATE
        automaton = at.automaton
        key = ("automaton", automaton.key)
        resident = self._residents.get(key)
        if resident is None:
            resident = self._bring(key, automaton)
        else:
            self._residents.move_to_end(key)
        self._in_use.add(key)
        return resident.states[0] + at.state

    def mask(self, mask: np.ndarray | MaskRow) -> int:
        """Return the row of `tables.masks` that holds `mask`, which must not change before `flush`.

        A mask of fewer words excludes all tokens beyond. Raises RuntimeError for a table's row that
        is not filled.
        """
        if not isinstance(mask, MaskRow):
            place = self._take(self._masks, 1)
            self._private.append(place)
            self._fresh_masks.append((place, mask))
            return place
        key = ("mask", mask.table.key, mask.row)
        resident = self._residents.get(key)
        if resident is None:
            if not mask.table.filled(mask.row):
                raise RuntimeError(f"row {mask.row} of mask table {mask.table.key} is not filled")
            resident = _Resident(masks=[self._take(self._masks, 1)])
            self._residents[key] = resident
            self._fresh_masks.append((resident.masks[0], mask.table.rows[mask.row]))
        else:
            self._residents.move_to_end(key)
        self._in_use.add(key)
        return resident.masks[0]

    def flush(self) -> None:
        """Upload automata and masks added since the last call."""
        for name, start, values in self._fresh:
            target = self._tensors[name][start : start + len(values)]
            target.copy_(self._staged(values), non_blocking=True)
            self.uploaded_bytes += values.nbytes
        self._fresh.clear()
        if self._fresh_masks:
            self._flush_masks()
            self._fresh_masks.clear()

    def _flush_masks(self) -> None:
        # A place freed and taken again within one step: the later mask counts.
        latest = dict(self._fresh_masks)
        words = self._host(len(latest), self._words)
        array = words.numpy()
        for row, mask in zip(array, latest.values(), strict=True):
            count = min(len(mask), self._words)
            row[:count] = mask[:count]
            row[count:] = 0
        slots = self._host(len(latest))
        slots.numpy()[:] = list(latest)
        place = slots.to(self._device, non_blocking=True)
        self._tensors["masks"].index_copy_(
            0, place.long(), words.to(self._device, non_blocking=True)
        )
        self.uploaded_bytes += words.nbytes

    def _staged(self, values: np.ndarray) -> torch.Tensor:
        host = self._host(*values.shape)
        host.numpy()[:] = values
        return host

    def _host(self, *shape: int) -> torch.Tensor:
        """Allocate int32 memory that a GPU copies by itself; torch keeps the memory until then."""
        import torch

        return torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")

    # ------------------------------------------------------------ room

    def _bring(self, key: Hashable, automaton: SteppedAutomaton) -> _Resident:
        states, classes = automaton.next_state.shape
        resident = _Resident()
        try:
            for _ in range(len(automaton.masks)):
                resident.masks.append(self._take(self._masks, 1))
            resident.classes = self._take(self._classes, 1), 1
            resident.states = self._take(self._states, states), states
            steps = states * classes
            resident.steps = self._take(self._steps, steps), steps
        except BaseException:
            self._free(resident)
            raise
        self._residents[key] = resident
        base, start = resident.states[0], resident.steps[0]
        slots = np.array(resident.masks, np.int32)
        self._fresh += [
            ("mask_of", base, slots[automaton.mask_of]),
            ("class_row", base, np.full(states, resident.classes[0], np.int32)),
            ("next_start", base, np.arange(states, dtype=np.int32) * classes + np.int32(start)),
            ("next_state", start, _renumbered(automaton.next_state, base)),
            ("token_class", resident.classes[0], self._per_token(automaton.token_class)),
        ]
        self._fresh_masks += zip(resident.masks, automaton.masks, strict=True)
        return resident

    def _per_token(self, token_class: np.ndarray) -> np.ndarray:
        """Return each token's class, int32 [1, vocab_size]; masks exclude unknown tokens."""
        found = np.zeros((1, self._vocab_size), np.int32)
        count = min(len(token_class), self._vocab_size)
        found[0, :count] = token_class[:count]
        return found

    def _take(self, space: Runs, count: int) -> int:
        """Take places from a space; evict others or grow the space if there is no room."""
        while (found := space.take(count)) is None:
            if not self._evict():
                self._grow(space, count)
        return found

    def _evict(self) -> bool:
        """Evict the least recently used automaton or mask that this step does not use."""
        key = next((key for key in self._residents if key not in self._in_use), None)
        if key is None:
            return False
        self._free(self._residents.pop(key))
        return True

    def _free(self, resident: _Resident) -> None:
        for place in resident.masks:
            self._masks.give(place, 1)
        self._classes.give(*resident.classes)
        self._states.give(*resident.states)
        self._steps.give(*resident.steps)

    def _grow(self, space: Runs, count: int) -> None:
        """Move the space's tables to larger memory: graphs captured with the tables are void."""
        old = space.size
        size = max(2 * old, old + count)
        for name in space.tables:
            tensor = self._tensors[name]
            grown = tensor.new_empty((size, *tensor.shape[1:]))
            grown[:old] = tensor
            self._tensors[name] = grown
        space.grow(size)
        self.generation += 1


def arena_for(
    vocab_size: int, max_rows: int, device: torch.device, max_bytes: int = ARENA_BYTES
) -> AutomatonArena:
    """Build an arena with room for twice the masks that a step of `max_rows` may bring."""
    least = 4 * max_rows * 4 * (-(-vocab_size // 32))
    return AutomatonArena(vocab_size, device, max(max_bytes, least))


def _renumbered(next_state: np.ndarray, base: int) -> np.ndarray:
    """Return states numbered among those of all automata, flat int32."""
    flat = next_state.reshape(-1)
    return np.where(flat >= 0, flat + np.int32(base), np.int32(DEAD_STATE))
