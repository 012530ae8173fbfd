"""A decoder of transformers' modules: tokens of all rows as one sequence, attention by rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rootlace.kernels import KernelSet
from rootlace.kernels.interface import KVCodes
from rootlace.kernels.reference.kv_cache import quantise
from rootlace.runtime.model.decoder.interface import StepInput
from rootlace.runtime.model.decoder.torch_decoder import with_sinks
from rootlace.runtime.model.families.spec import Foreign, ModelSpec
from rootlace.runtime.model.transformers_backend.attention import Call, attending
from rootlace.runtime.model.transformers_backend.config import Head


@dataclass(frozen=True)
class ForeignDecoder:
    """See `StepDecoder`. `base` is the model without its head; `codes`, what integers a cache holds
    that does not hold the model's own numbers."""

    spec: ModelSpec
    foreign: Foreign
    base: PreTrainedModel
    head: Head
    kernels: KernelSet
    codes: KVCodes | None = None

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.base.dtype
        return found

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

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
    """The attention of one step, whose layers ask in their order."""

    def __init__(self, decoder: ForeignDecoder, step: StepInput, cache: torch.Tensor) -> None:
        self._decoder = decoder
        self._step = step
        self._cache = cache
        self._layer = 0

    def __call__(self, call: Call) -> torch.Tensor:
        index, self._layer = self._layer, self._layer + 1
        attention, foreign = self._decoder.spec.attention, self._decoder.foreign
        kernels, step, codes = self._decoder.kernels, self._step, self._decoder.codes
        # What is shorter than the cache's heads has zeros behind it, which add nothing.
        q, k, v = (
            torch.nn.functional.pad(part, (0, attention.head_dim - part.shape[2]))
            if part.shape[2] < attention.head_dim
            else part
            for part in (call.queries, call.keys, call.values)
        )
        k_cache, v_cache = self._cache[index]
        if codes is not None:
            k, v = (quantise(part, codes.bits).unsqueeze(1) for part in (k, v))
        # Layers have rotated queries and keys already.
        kernels.write_kv(k_cache, v_cache, k, v, step.write_slots, step.write_tokens)
        out, lse = kernels.paged_attention(
            q,
            k_cache,
            v_cache,
            step.attention[attention.windows[index]],
            scale=foreign.key_size**-0.5 if call.scale is None else call.scale,
            soft_cap=call.soft_cap,
            scales=codes,
            want_lse=call.sinks is not None,
        )
        if lse is not None and call.sinks is not None:
            out = with_sinks(out, lse, call.sinks)
        return out[..., : foreign.value_size]
