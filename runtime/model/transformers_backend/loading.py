"""Load a model that transformers runs: its weights, its decoder, and a check of its steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import torch
import transformers
from msgspec.structs import replace
from transformers import PreTrainedModel

from rootlace.kernels.arrays import as_tensor, numpy_dtype, torch_dtype
from rootlace.kernels.interface import KernelSet, KVCodes
from rootlace.kernels.reference.kv_cache import mixed, quantise
from rootlace.runtime.contracts.plan import PooledRow
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.decoder.interface import StepInput, StepInputBuilder
from rootlace.runtime.model.decoder.rope import RotaryEmbedding
from rootlace.runtime.model.decoder.torch_decoder import with_sinks
from rootlace.runtime.model.executor.steps import ModelSetup
from rootlace.runtime.model.families.spec import ModelSpec, TransformersModules
from rootlace.runtime.model.transformers_backend.config import (
    ATTENTION,
    Call,
    Head,
    attending,
    first_line,
    read_config,
)
from rootlace.wire.errors import UnsupportedModel

# Decoder ------------------------------------------------------------------------------------------
#
# Decode with transformers' modules: tokens of all rows as one sequence, attention by rows.


class TransformersDecoder(msgspec.Struct, frozen=True):
    """Decoder of transformers' modules: see `StepDecoder`. `base`: the model without its head.
    `codes`: the integers of a cache that does not hold the model's own dtype."""

    spec: ModelSpec
    modules: TransformersModules
    base: PreTrainedModel
    head: Head
    kernels: KernelSet
    codes: KVCodes | None = None

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.base.dtype
        return found

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        attends = _CachedAttention(self, step, cache)
        with attending(attends):
            output = self.base(
                input_ids=step.token_ids.unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                use_cache=False,
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden if step.wanted is None else hidden.index_select(0, step.wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).float()

    def write_logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self.head(hidden))


class _CachedAttention:
    """Attention of one step, called by the layers in their order."""

    def __init__(self, decoder: TransformersDecoder, step: StepInput, cache: torch.Tensor) -> None:
        self._decoder = decoder
        self._step = step
        self._cache = cache
        self._layer = 0

    def __call__(self, call: Call) -> torch.Tensor:
        index, self._layer = self._layer, self._layer + 1
        attention, modules = self._decoder.spec.attention, self._decoder.modules
        kernels, step, codes = self._decoder.kernels, self._step, self._decoder.codes
        # Heads shorter than the cache's are padded with zeros, which add nothing.
        q, k, v = (
            torch.nn.functional.pad(part, (0, attention.head_dim - part.shape[2]))
            if part.shape[2] < attention.head_dim
            else part
            for part in (call.queries, call.keys, call.values)
        )
        k_cache, v_cache = self._cache[index]
        if codes is not None:
            q, k = mixed(q), mixed(k)
            k, v = (quantise(part, codes.bits).unsqueeze(1) for part in (k, v))
        # Layers have rotated queries and keys already.
        kernels.write_kv(k_cache, v_cache, k, v, step.write_slots, step.write_tokens)
        out, lse = kernels.paged_attention(
            q,
            k_cache,
            v_cache,
            step.attention[attention.windows[index]],
            scale=modules.key_size**-0.5 if call.scale is None else call.scale,
            soft_cap=call.soft_cap,
            scales=codes,
            want_lse=call.sinks is not None,
        )
        if lse is not None and call.sinks is not None:
            out = with_sinks(out, lse, call.sinks)
        return out[..., : modules.value_size]


# Parity check -------------------------------------------------------------------------------------
#
# Compare steps of this decoder with transformers' own attention.
#
# The layers' attention is known (`record`), but not whether other code mixes tokens.
# So a model is run on a few tokens without any attention, where no token may change another, and
# then by steps of this decoder and by transformers alone.


LENGTHS = (11, 7)
"""Lengths of the trial texts, the longest first."""
CUTS = (0, 4, 6, 7, 11)
"""Token positions at which the trial texts are cut into steps."""
BLOCK_SIZE = 16
MOST_APART = {torch.float32: 0.01, torch.bfloat16: 0.15}
"""Largest difference of hidden states, as a share of their length; mixed texts differ altogether.
In bfloat16 the median counts: a token that goes to other experts changes much, too."""
MOST_MIXED = 0.01
"""Largest difference without attention, as a share: only the rounding of products may differ."""
COMPANY = 12
"""Tokens of a trial step without attention."""


@torch.inference_mode()
def check_parity(
    config: ModelConfig,
    decoder: TransformersDecoder,
    base: PreTrainedModel,
    rotary: RotaryEmbedding,
    kernels: KernelSet,
) -> None:
    """Raise `UnsupportedModel` if tokens are mixed by anything but attention, or if steps of
    several texts differ from each text alone. `base`: the model without its head."""
    mixed = _mixed(config, base, decoder.dtype)
    if not mixed <= MOST_MIXED:
        raise UnsupportedModel(
            f"{config.file}: its modules mix tokens by something else than attention: hidden "
            f"states change by {100 * mixed:.3g} % with the other tokens of a step"
        )
    random = np.random.default_rng(0)
    texts = [random.integers(0, config.spec.vocab_size, count) for count in LENGTHS]
    device = next(base.parameters()).device
    inputs = StepInputBuilder(config.spec, kernels, rotary, BLOCK_SIZE, decoder.dtype, device)
    memory = kv_pool.allocate(config, len(texts), BLOCK_SIZE, numpy_dtype(decoder.dtype))
    cache = as_tensor(memory).to(device)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for begin, end in pairwise(CUTS):
        rows = [text[begin:end] for text in texts if begin < len(text)]
        counts = [len(row) for row in rows]
        pooled = [PooledRow(0, sum(counts))]
        plan = kv_pool.plan_of_rows(rows, BLOCK_SIZE, begin, pooled=pooled)
        parts = decoder.forward(inputs.build(plan), cache).split(counts)
        for text, part in zip(found, parts, strict=False):
            text.append(part)
    expected = _alone(base, texts, device)
    apart = torch.cat(
        [
            (torch.cat(parts).float() - alone.float()).norm(dim=1) / alone.float().norm(dim=1)
            for parts, alone in zip(found, expected, strict=True)
        ]
    )
    largest = _largest(apart, decoder.dtype)
    if not largest <= MOST_APART[decoder.dtype]:
        raise UnsupportedModel(
            f"{config.file}: its modules compute something else with our attention than with "
            f"transformers' own: hidden states differ by {100 * largest:.3g} %"
        )


def _largest(apart: torch.Tensor, dtype: torch.dtype) -> float:
    return float(apart.max() if dtype == torch.float32 else apart.median())


def _mixed(config: ModelConfig, base: PreTrainedModel, dtype: torch.dtype) -> float:
    """Return the change of hidden states, as a share of their length, if tokens stand elsewhere in
    a step, beside other ones. No token attends to another."""
    random = np.random.default_rng(1)
    device = next(base.parameters()).device
    tokens = torch.from_numpy(random.integers(0, config.spec.vocab_size, 2 * COMPANY)).to(device)
    positions = torch.from_numpy(random.integers(0, config.spec.max_context, 2 * COMPANY))
    positions = positions.to(device)

    def hidden(which: np.ndarray) -> torch.Tensor:
        chosen = torch.from_numpy(which).to(device)
        with attending(_own_value):
            found: torch.Tensor = base(
                input_ids=tokens[chosen].unsqueeze(0),
                position_ids=positions[chosen].unsqueeze(0),
                use_cache=False,
            ).last_hidden_state[0]
        return found.float()

    # Every second token of the other step is from the first step, in another order.
    same = random.permutation(COMPANY)[: COMPANY // 2]
    other = np.stack([same, COMPANY + np.arange(COMPANY // 2)], axis=1).ravel()
    before, after = hidden(np.arange(COMPANY))[same], hidden(other)[::2]
    return _largest((after - before).norm(dim=1) / before.norm(dim=1), dtype)


def _own_value(call: Call) -> torch.Tensor:
    """Return each token's own value, times a factor that depends on its query and key."""
    heads = call.queries.shape[1]
    keys, values = (
        part.repeat_interleave(heads // part.shape[1], dim=1) for part in (call.keys, call.values)
    )
    return values * (1 + (call.queries[..., :1] - keys[..., -1:]).tanh())


def _alone(
    base: PreTrainedModel, texts: Sequence[np.ndarray], device: torch.device
) -> list[torch.Tensor]:
    """Return the hidden states of each text [len, H], by transformers alone."""
    base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
    try:
        return [
            base(
                input_ids=torch.from_numpy(text).to(device).unsqueeze(0), use_cache=False
            ).last_hidden_state[0]
            for text in texts
        ]
    finally:
        base.set_attn_implementation(ATTENTION)


# Loading ------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


def load_transformers(
    setup: ModelSetup, modules: TransformersModules, kernels: KernelSet
) -> TransformersDecoder:
    """Read the weights, and compare steps with transformers' own. Raises `UnsupportedModel`."""
    config = setup.config
    log.info(
        "%s: %s is run by transformers' own modules (%s), with our cache and attention",
        config.path,
        modules.architecture,
        transformers.__version__,
    )
    if setup.progress is not None:
        setup.progress("weights", 0.0)
    model = _load(config, modules, torch_dtype(setup.dtype)).to(torch.device(setup.device))
    base, head = model.base_model, Head(model)
    decoder = TransformersDecoder(config.spec, modules, base, head, kernels)
    try:
        check_parity(config, decoder, base, setup.rotary, kernels)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{config.file}: its modules cannot compute a step: {first_line(error)}"
        ) from error
    codes = kv_pool.codes(config.spec.attention, setup.kv_dtype)
    return decoder if codes is None else replace(decoder, codes=codes)


def _load(config: ModelConfig, modules: TransformersModules, dtype: torch.dtype) -> PreTrainedModel:
    """Load the weights. Raises `UnsupportedModel` instead of making up missing ones."""
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = getattr(transformers, modules.architecture).from_pretrained(
            config.path,
            config=read_config(config.path),
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise UnsupportedModel(f"{config.path}: {first_line(error)}") from error
    for what, key in (
        ("weights are missing", "missing_keys"),
        ("weights that the architecture does not have", "unexpected_keys"),
        ("weights of other shapes", "mismatched_keys"),
    ):
        names = sorted(map(str, found[key]))
        if names:
            some = ", ".join(names[:5]) + (" ..." if names[5:] else "")
            raise UnsupportedModel(f"{config.path}: {what}: {some}")
    loaded: PreTrainedModel = model
    return loaded
