"""Run the decoder in C++ (`kernels/native`): a step is one call, on the plan's own arrays."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rootlace.kernels.interface import KVCodes
from rootlace.kernels.native import library as native
from rootlace.kernels.native.library import LANES, SEEK_RUNS, Team, Workspace
from rootlace.kernels.native.packed import ACTIVATIONS
from rootlace.runtime.contracts.plan import MaskRow, StepPlan
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.automaton_table import Mask, words_of
from rootlace.runtime.model.decoder import interface
from rootlace.runtime.model.decoder.interface import BOTH_SUPPORT, adapter_of_tokens, wanted_tokens
from rootlace.runtime.model.decoder.native_weights import ADAPTED, NativeWeights
from rootlace.runtime.model.decoder.rotations import Rotations, query_factors
from rootlace.runtime.model.families import spec as support
from rootlace.runtime.model.families.spec import ModelSpec, Support

if TYPE_CHECKING:
    from rootlace.runtime.model.lora import Adapter
    from rootlace.runtime.model.parallel.group import Group

MAX_HEAD_DIM, MAX_CACHED = 256, 1024
"""Largest sizes of a head, and of a token's cached vector in latent attention (`src/latent.h`)."""
SLOTS, DIMS = LANES, 2 * LANES
"""Factors of the block sizes and head sizes of integer caches (`src/kv_codes.h`)."""
TABLE_BYTES = 128 << 20
"""Most memory in bytes for the rotations of all positions; beyond, each step computes its own."""

PARTS = ("plan", "elementwise", "linear", "attention")
"""Parts of a step that `RlStep.nanos` times."""


SUPPORT: Support = {**BOTH_SUPPORT}
"""Values that `src/forward.cpp` computes, with the given weights and rotations."""


def why_not(
    spec: ModelSpec, kv_dtype: np.dtype[Any], block_size: int, ranks: int = 1
) -> str | None:
    """Explain why the native decoder cannot run a model; None if it can. Checks a KV cache of
    `kv_dtype` in blocks of `block_size` tokens, and a division among `ranks`."""
    if ranks > 1 and spec.attention.joint_norm:
        return "a norm of all heads together is not divided among ranks"
    dim, latent = spec.attention.head_dim, spec.attention.latent
    integers = kv_pool.codes(spec.attention, kv_dtype) is not None
    if integers and (block_size % SLOTS or dim % DIMS):
        return (
            f"a KV cache of integers has blocks of a multiple of {SLOTS} tokens and heads of a "
            f"multiple of {DIMS} numbers, not {block_size} and {dim}"
        )
    if not integers and kv_dtype not in ACTIVATIONS:
        return f"a KV cache of {kv_dtype} is read by the reference kernels only"
    limit = MAX_HEAD_DIM if latent is None else MAX_CACHED
    if dim > limit or dim % 2 or (latent is not None and dim - latent.rank > MAX_HEAD_DIM):
        return f"attention.head_dim {dim} is not supported"
    if spec.attention.scale <= 0:
        return f"attention.scale {spec.attention.scale} is not supported"
    # Refuse what the reference refuses: combinations of values without a meaning.
    return support.why_not(spec, SUPPORT) or interface.why_not(spec)


def why_not_adapters(adapters: Sequence[Adapter]) -> str | None:
    """Explain why the native decoder cannot apply adapters; None if it can."""
    for adapter in adapters:
        others = {name for layer in adapter.layers for name in layer} - {*ADAPTED}
        if others:
            return f"adapter {adapter.name!r} changes experts, or what chooses them"
    return None


class DraftInput(msgspec.Struct, frozen=True):
    """Input of a draft head's step in place of embeddings: `residual`, float32 [T, H], and the
    `inputs` of the first layer's products, of the decoder's dtype. The step writes `wanted`,
    float32 [N, H]: the residual stream of the wanted tokens behind the last layer."""

    residual: np.ndarray
    inputs: np.ndarray
    wanted: np.ndarray


class NativeDecoder:
    """Decoder in C++: see `interface.Forward`. Not thread-safe."""

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        spec: ModelSpec,
        weights: NativeWeights,
        rotations: Rotations,
        cache: np.ndarray,
        codes: KVCodes | None = None,
        ranks: Group | None = None,
    ) -> None:
        """`cache`: [layers, 2, num_blocks, block_size, kv_heads, head_dim] (latent: 1 in place of
        2), of the weights' dtype, or rows of integers of `codes`. `ranks`: the group of all ranks,
        if spec and weights are one rank's; logits are then of the rank's part of the vocabulary.
        The kernels decide the layout inside a block (`src/kv_layout.h`)."""
        self._library = library
        self._team = team
        self._workspace = Workspace(library)
        self._spec = spec
        self.weights = weights
        self._cache = cache
        self.dtype = weights.dtype
        self._rotations = rotations
        self._tables = rotations.tables(TABLE_BYTES)
        self._model = weights.model
        self._logits = np.empty((0, self._model.vocab), np.float32)
        self._logits_at = self._logits.ctypes.data
        self._ranks = ranks
        self._captured = np.empty(0, np.int32)
        self._states: np.ndarray | None = None
        self._fault: BaseException | None = None
        if ranks is not None:
            self._model.sum = native.Sum(self._sum)
        self._model.cache = cache.ctypes.data
        self._model.kv_bits = 0 if codes is None else codes.bits
        self._model.num_blocks, self._model.block_size = cache.shape[2:4]
        self._num_slots = cache.shape[2] * cache.shape[3]
        if self._tables is not None:
            self._rotate_by(*self._tables)
        self._address = ctypes.addressof(self._model)
        self.nanos: np.ndarray | None = None
        """Nanoseconds by part, int64 [len(PARTS)], to which each step adds; None: not measured."""

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    def capture(self, layers: Sequence[int]) -> None:
        """Have each step keep its tokens' hidden states before these layers for `take_states`."""
        self._captured = np.array(layers, np.int32)

    def take_states(self) -> np.ndarray | None:
        """Return the captured states of the last step, [T, layers, H] of the decoder's dtype; None
        if the step failed or the states were already taken."""
        states, self._states = self._states, None
        return states

    def hide_first(self) -> None:
        """Have no token attend to the first slot of its row."""
        self._model.unseen = 1

    def run(self, plan: StepPlan, draft: DraftInput | None = None) -> np.ndarray:
        """Copy blocks, run all layers and return the hidden states of the wanted tokens [N, H].

        Raises ValueError for tokens, positions, slots or copied blocks that do not exist. Block
        tables are trusted: a check would take time that grows with the context.
        """
        int32, as_array = np.int32, np.ascontiguousarray
        token_ids = as_array(plan.token_ids, int32)
        positions = as_array(plan.positions, int32)
        count = len(token_ids)
        slots, sources = plan.slots, None
        if len(plan.duplicate_tokens):
            slots = np.concatenate((slots, plan.duplicate_slots))
            sources = np.concatenate((np.arange(count, dtype=np.int32), plan.duplicate_tokens))
        slots = as_array(slots, np.int64)
        copies = as_array(plan.copies, int32)
        # Refuse indices at which the kernels would read or write outside their arrays.
        if len(copies):
            last = (self._model.num_blocks - 1, self._model.num_blocks - 1, self._model.block_size)
            if copies.min() < 0 or (copies.max(axis=0) > last).any():
                raise ValueError("a block to be copied is not in the KV cache")
        last_position = int(positions.max(initial=-1))
        if count:
            if not 0 <= token_ids.min() <= token_ids.max() < self._spec.vocab_size:
                raise ValueError("a token id is not in the vocabulary")
            if not 0 <= slots.min() <= slots.max() < self._num_slots:
                raise ValueError("a slot is not in the KV cache")
            if not 0 <= positions.min() <= last_position < self._rotations.context_length:
                raise ValueError("a position is beyond the context")
        wanted, wanted_count = None, count
        plain = len(plan.samples) == len(plan.context_len) == count
        if not plain or plan.prompt_scores or plan.pooled:  # otherwise all tokens, in order
            wanted = wanted_tokens(plan).astype(int32)
            wanted_count = len(wanted)
        hidden = np.empty((wanted_count, self._spec.hidden_size), self.dtype)
        rotations = positions
        if self._tables is None:
            self._rotate_by(*self._rotations.of(positions))
            rotations = np.arange(count, dtype=np.int32)
        elif last_position >= self._rotations.filled:
            self._rotations.reach(last_position)
        growth, factors = self._spec.attention.growth, None
        if growth is not None:
            factors = query_factors(growth, positions).astype(self.dtype).astype(np.float32)
        captured, states = self._captured, None
        self._states = None
        if len(captured):
            states = np.empty((count, len(captured), self._spec.hidden_size), self.dtype)
        rows = self.weights.stored_rows
        if rows is not None:
            token_ids = rows.places(token_ids)
            self._model.embedding = rows.table.ctypes.data
        row_start = as_array(plan.row_start, int32)
        context_len = as_array(plan.context_len, int32)
        tables = as_array(plan.block_tables, int32)
        starts, lengths = row_start.ctypes.data, context_len.ctypes.data
        rows_at = native.Rows(*tables.shape, starts, lengths, tables.ctypes.data, SEEK_RUNS)
        adapters = as_array(adapter_of_tokens(plan), int32) if len(plan.adapters) else None
        step = native.Step(
            count,
            len(slots),
            wanted_count,
            len(copies),
            token_ids.ctypes.data,
            positions.ctypes.data,
            rotations.ctypes.data,
            None if factors is None else factors.ctypes.data,
            slots.ctypes.data,
            None if sources is None else sources.ctypes.data,
            None if wanted is None else wanted.ctypes.data,
            copies.ctypes.data,
            rows_at,
            None if adapters is None else adapters.ctypes.data,
            None if draft is None else draft.residual.ctypes.data,
            None if draft is None else draft.inputs.ctypes.data,
            len(captured),
            captured.ctypes.data,
            None if states is None else states.ctypes.data,
            None if draft is None else draft.wanted.ctypes.data,
            hidden.ctypes.data,
            None if self.nanos is None else self.nanos.ctypes.data,
        )
        status = self._library.rl_forward(
            self._team.handle, self._workspace.handle, self._address, ctypes.addressof(step)
        )
        if status:
            raise self._fault or native.failure(self._library, status)
        self._states = states
        return hidden

    def _sum(self, address: int, count: int) -> int:
        """Sum a float32 array over the ranks (`RlModel.sum`); a thread of the team calls."""
        import torch  # the ranks communicate through torch

        assert self._ranks is not None
        try:
            part = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
            part[:] = self._ranks.summed(torch.from_numpy(part)).numpy()
        except BaseException as fault:
            self._fault = fault
            return 1
        return 0

    def logits(self, hidden: np.ndarray, masks: Sequence[Mask] = ()) -> np.ndarray:
        """Return logits, float32 [N, V], valid until the next call; see `interface.Forward`."""
        self._project(hidden, masks, None)
        return self._logits[: len(hidden)]

    def vectors(self, hidden: np.ndarray) -> np.ndarray:
        """See `interface.Forward`."""
        return hidden.astype(np.float32)

    def best(self, hidden: np.ndarray, masks: Sequence[Mask] = ()) -> np.ndarray:
        """See `interface.Forward`."""
        tokens = np.empty(len(hidden), np.int32)
        self._project(hidden, masks, tokens.ctypes.data)
        return tokens

    def _project(self, hidden: np.ndarray, masks: Sequence[Mask], tokens: int | None) -> None:
        count = len(hidden)
        if len(self._logits) < count:
            # Keep the array between steps: allocating this size costs more than writing.
            self._logits = np.empty((count, self._model.vocab), np.float32)
            self._logits_at = self._logits.ctypes.data
        hidden = np.ascontiguousarray(hidden)
        addresses, _kept = addresses_of(masks, self._spec.vocab_size) if masks else (None, ())
        status = self._library.rl_logits(
            self._team.handle,
            self._address,
            hidden.ctypes.data,
            count,
            addresses.buffer_info()[0] if addresses else None,
            self._logits_at,
            tokens,
        )
        if status:
            raise native.failure(self._library, status)

    def _rotate_by(self, cos: np.ndarray, sin: np.ndarray) -> None:
        self._read = (cos, sin)
        self._model.cos, self._model.sin = cos.ctypes.data, sin.ctypes.data
        self._model.rotation_stride = cos.shape[1]


def addresses_of(masks: Sequence[Mask], vocab_size: int) -> tuple[array[int], list[np.ndarray]]:
    """Return the masks' addresses, int64, 0 where everything is allowed; empty if all masks allow
    everything. The caller keeps the returned arrays as long as the addresses are in use."""
    out = array("q", bytes(8 * len(masks)))
    arrays: list[np.ndarray] = []
    for at, mask in enumerate(masks):
        if type(mask) is MaskRow and mask.address:
            out[at] = mask.address
        elif mask is not None:
            whole, words = np.ascontiguousarray(words_of(mask)), -(-vocab_size // 32)
            if len(whole) < words:  # tokens beyond the mask are excluded
                whole = np.pad(whole, (0, words - len(whole)))
            arrays.append(whole)
            out[at] = whole.ctypes.data
    return out if any(out) else array("q"), arrays
