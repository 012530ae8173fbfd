"""Draft with an EAGLE-3 head from the hidden states of the served model.

 token        x0    x1    x2    x3    x4        x3 is the last one, x4 a draft
 slot          0     1     2     3     4        of one table, in all pools
 feature      f0    f1    f2    o3    o4        f = fc(the model's states), o: what the head made
 keys, values  -  f0,x1 f1,x2 f2,x3 o3,x4       of the head's layer

Each step of the model leaves its tokens' features. The head reads a token together with the feature
before the token, at the feature's position. The head's output stands for the feature that the model
has not computed yet. Keys and values depend on the token and the feature before alone. So they
serve any continuation of a prefix, and a part of a context can be left out. Drafted tokens are
computed again behind the model's own features.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from rootlace.kernels.native import library as native
from rootlace.kernels.native.packed import BFLOAT16, FLOAT32
from rootlace.runtime.contracts.block_store import LOAD
from rootlace.runtime.contracts.plan import StepPlan
from rootlace.runtime.model.automaton_table import Mask
from rootlace.runtime.model.checkpoint.eagle_head import (
    INTEGERS,
    HeadConfig,
    layer_name,
    says_nothing,
)
from rootlace.runtime.model.checkpoint.files import Checkpoint, Progress
from rootlace.runtime.model.checkpoint.source import has_weights
from rootlace.runtime.model.decoder.interface import copied_slots, wanted_tokens
from rootlace.runtime.model.decoder.native_decoder import DraftInput, NativeDecoder
from rootlace.runtime.model.executor.cpu_setup import LoadedModel, on_cpu, packer_of
from rootlace.runtime.model.executor.draft_model import DraftDecoder, check_drafted_for
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.steps import Beside, ModelSetup
from rootlace.runtime.model.kv_pool import block_bytes
from rootlace.wire.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

    from rootlace.runtime.model.checkpoint.weights import ModelWeights

log = logging.getLogger(__name__)

_EMBEDDING = "embed_tokens.weight"
_STORED = {FLOAT32: "F32", BFLOAT16: "BF16"}
"""safetensors' names of the activations' dtypes."""
_BYTES = {"int8": 9 / 8, "int4": 5 / 8}
"""Approximate bytes of a weight that `--quantize` rounds."""

# Setup --------------------------------------------------------------------------------------------


def head_beside(draft: ModelSetup) -> Beside:
    """Return the memory of a head: for each token a feature beside keys and values."""
    config, size, itemsize = draft.config, draft.cache.block_size, draft.dtype.itemsize
    assert isinstance(config, HeadConfig)
    features = size * config.spec.hidden_size * itemsize
    there = has_weights(config.path, config.allow_pickle)
    stored = Checkpoint(config.path, config.allow_pickle).types if there else {}
    weights = 0.0
    for name, what in config.expected(stored).items():
        # Of an embedding that stays in the file, only used rows take memory.
        mapped = name == _EMBEDDING and stored[name] == _STORED[draft.dtype]
        if name != "d2t" and not mapped:
            rounds = "_proj." in name or name == "lm_head.weight"
            each = _BYTES.get(draft.executor.quantize, itemsize) if rounds else itemsize
            weights += math.prod(what.shapes[0]) * each
    return Beside(int(weights), block_bytes(config, size, draft.kv_dtype) + features)


def load_head(draft: ModelSetup, model: LoadedModel) -> HeadDecoder:
    """Load the head beside its `model`, on the same threads, with as many blocks; the model's steps
    then keep the hidden states that the head reads. Raises as `on_cpu` does, and `UnsupportedModel`
    for weights that are not a head's."""
    import torch

    from rootlace.kernels.arrays import torch_dtype
    from rootlace.kernels.weights import Dense

    check_drafted_for(draft, "cpu", native=model.kernels == "native")
    config = draft.config
    assert isinstance(config, HeadConfig) and model.team is not None
    blocks, size = model.pool.shape[2:4]
    checkpoint = Checkpoint(config.path, config.allow_pickle)
    checkpoint.expect(config.expected(checkpoint.types), says_nothing)
    layer, dtype = layer_name(checkpoint.types), torch_dtype(draft.dtype)
    found = on_cpu(
        replace(
            draft,
            cache=dataclasses.replace(draft.cache, num_blocks=blocks),
            weights_of=_reading(checkpoint, config),
        ),
        team=model.team,
    )
    assert isinstance(found.forward, NativeDecoder) and isinstance(model.forward, NativeDecoder)
    found.forward.hide_first()
    packer = packer_of(native.load(), model.team, draft)
    with torch.inference_mode():
        fusing = packer.pack(Dense(checkpoint.tensor("fc.weight").to(dtype)))
    embedded = _EMBEDDING in checkpoint.types
    forward = HeadForward(
        config,
        found.forward,
        (found.forward if embedded else model.forward).weights.embeddings,
        [
            checkpoint.array(f"{layer}{name}.weight").astype(np.float32)
            for name in ("input_layernorm", "hidden_norm")
        ],
        _targets(config, checkpoint),
        np.zeros((blocks * size, config.spec.hidden_size), found.forward.dtype),
        size,
    )
    model.forward.capture(config.layers)
    steps = PlainSteps(forward, found.sampling, found.damage)
    fuse = partial(fusing.products, packer.library, model.team)
    decoder = HeadDecoder(steps, model, model.forward, forward.features, fuse)
    milliseconds = 1e3 * decoder.step_seconds
    log.info("the head %s takes %.3g ms a token", config.path, milliseconds)
    return decoder


def _targets(config: HeadConfig, checkpoint: Checkpoint) -> np.ndarray:
    """Return the model's token of each of the head's tokens, int32 [draft vocabulary]."""
    ids = np.arange(config.draft_vocab_size)
    if "d2t" in checkpoint.types:
        ids += checkpoint.array("d2t", INTEGERS)
    if ids.min() < 0 or ids.max() >= config.spec.vocab_size:
        raise UnsupportedModel(
            f"{config.path}: d2t: it names a token that is not among the model's "
            f"{config.spec.vocab_size}"
        )
    return ids.astype(np.int32)


def _reading(checkpoint: Checkpoint, config: HeadConfig) -> Callable[..., ModelWeights]:
    """Build the reader of the head's weights, for a model with the head's one layer."""

    def weights(
        _: object, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
    ) -> ModelWeights:
        import torch

        from rootlace.kernels.weights import Dense
        from rootlace.runtime.model.checkpoint.weights import LayerWeights, ModelWeights

        def read(name: str) -> torch.Tensor:
            return checkpoint.tensor(f"{name}.weight").to(dtype)

        def joined(*names: str) -> Dense:
            return Dense(torch.cat([read(layer + name) for name in names]))

        layer = layer_name(checkpoint.types)
        return ModelWeights(
            embedding=read("embed_tokens")
            if _EMBEDDING in checkpoint.types
            else torch.empty(0, config.spec.hidden_size, dtype=dtype),
            layers=[
                LayerWeights(
                    qkv=joined(*(f"self_attn.{one}_proj" for one in "qkv")),
                    output=joined("self_attn.o_proj"),
                    gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
                    down=joined("mlp.down_proj"),
                    post_norm=read(f"{layer}post_attention_layernorm"),
                )
            ],
            final_norm=read("norm"),
            head=Dense(read("lm_head")),
        )

    return weights


# Head ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HeadForward:
    """Forward pass of a head: see `interface.Forward`; logits are of the model's vocabulary. Not
    thread-safe. `norms`: weights of the norms of embeddings and of features, float32 [H].
    `targets`: see `_targets`. `features`: [slots, H], each token's."""

    config: HeadConfig
    decoder: NativeDecoder
    embeddings: Callable[[np.ndarray], np.ndarray]
    norms: Sequence[np.ndarray]
    targets: np.ndarray
    features: np.ndarray
    block_size: int

    @property
    def vocab_size(self) -> int:
        return self.config.spec.vocab_size

    def run(self, plan: StepPlan) -> np.ndarray:
        """Run a plan: see `interface.Forward`. Reads the feature before each token, and writes one
        for each wanted token."""
        (embedded, feature), eps = self.norms, self.config.spec.norm.eps
        residual = self.features[self._slots_before(plan)].astype(np.float32)
        normed = _normed(residual, feature, eps)
        beside = _normed(self.embeddings(plan.token_ids), embedded, eps)
        inputs = np.concatenate((beside, normed), axis=1).astype(self.decoder.dtype)
        wanted = plan.slots[wanted_tokens(plan)]
        draft_input = DraftInput(
            normed if self.config.norm_before_residual else residual,
            inputs,
            np.empty((len(wanted), residual.shape[1]), np.float32),
        )
        # The head's positions are the features' positions.
        moved = replace(plan, positions=plan.positions - 1)
        hidden = self.decoder.run(moved, draft_input)
        self.features[wanted] = hidden if self.config.norm_output else draft_input.wanted
        return hidden

    def _slots_before(self, plan: StepPlan) -> np.ndarray:
        """Return the slot before each token's own, in the token's row."""
        owner = np.repeat(np.arange(len(plan.context_len)), np.diff(plan.row_start))
        back = plan.row_start[owner + 1] - np.arange(len(owner))
        at = plan.context_len[owner] - back - 1
        blocks = plan.block_tables[owner, at // self.block_size].astype(np.int64)
        slots: np.ndarray = blocks * self.block_size + at % self.block_size
        return slots

    def logits(self, hidden: np.ndarray, masks: Sequence[Mask] = ()) -> np.ndarray:
        """Compute logits: see `interface.Forward`. Tokens that the head lacks are never chosen."""
        found = np.full((len(hidden), self.vocab_size), -np.inf, np.float32)
        found[:, self.targets] = self.decoder.logits(hidden)
        return found

    def vectors(self, hidden: np.ndarray) -> np.ndarray:
        """See `interface.Forward`."""
        return self.decoder.vectors(hidden)

    def best(self, hidden: np.ndarray, masks: Sequence[Mask] = ()) -> np.ndarray | None:
        """See `interface.Forward`."""
        if any(mask is not None for mask in masks):
            return None
        best = self.decoder.best(hidden)
        found: np.ndarray = np.where(best < 0, best, self.targets[best])
        return found


def _normed(rows: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Apply RMSNorm to float32 rows [T, H]."""
    scale = 1 / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + np.float32(eps))
    normed: np.ndarray = rows * scale * weight
    return normed


class HeadDecoder(DraftDecoder):
    """Decoder of drafts by a head: see `contracts.plan.DraftModel`. The context begins behind
    blocks loaded from below the pool."""

    first = 1
    keeps_drafted = False

    def __init__(
        self,
        steps: PlainSteps,
        model: LoadedModel,
        decoder: NativeDecoder,
        features: np.ndarray,
        fuse: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        """`fuse`: makes features of the states that the `model`'s `decoder` captures. `features`:
        the head's."""
        super().__init__(steps, model, model.setup.context_length, decoder.vocab_size)
        self._decoder = decoder
        self._features = features
        self._fuse = fuse
        self._captured = np.zeros(len(features), bool)
        """Slots that have the feature of the model's token there."""

    def _begin(self, token_ids: np.ndarray, table: np.ndarray) -> tuple[int, int]:
        length = len(token_ids)
        captured = self._captured[self._slots(table, length - 1)]
        skipped = 0
        if not captured.all():
            last = length - 2 - int(captured[::-1].argmin())
            skipped = (last // self._size + 1) * self._size
        begin = skipped + self.first
        if begin >= length:  # no feature is before the last token
            return length, 0
        return self._first_unlike(token_ids, table, begin), skipped

    def launched(self, plan: StepPlan) -> None:
        """Take the hidden states of a computed step, and make features of the states."""
        super().launched(plan)
        states, features, captured = self._decoder.take_states(), self._features, self._captured
        sources, targets = copied_slots(plan, self._size)
        features[targets], captured[targets] = features[sources], captured[sources]
        if states is None:  # the step failed
            captured[targets] = captured[plan.slots] = captured[plan.duplicate_slots] = False
            return
        try:
            found = self._fuse(states)
        except Exception:
            log.exception("the head's product with `fc` failed: nothing more is drafted with it")
            self._decoder.capture(())
            captured[:] = False
            return
        features[plan.slots] = found
        features[plan.duplicate_slots] = found[plan.duplicate_tokens]
        captured[plan.slots] = captured[plan.duplicate_slots] = True

    def moved(self, moves: np.ndarray) -> None:
        """Forget loaded blocks' features, which are not kept below the pool; see `DraftDecoder`."""
        super().moved(moves)
        loaded = moves[moves[:, 0] == LOAD, 3]
        self._captured.reshape(-1, self._size)[loaded] = False
