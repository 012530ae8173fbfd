"""The model runner: the executor that has a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from rootlace.errors import InvalidRequest
from rootlace.kernels import KernelSet, kernels_for
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.config import ModelConfig
from rootlace.runtime.model.decoder import Decoder
from rootlace.runtime.model.loader import checkpoint_dtype, load_weights
from rootlace.runtime.model.mask_tables import MaskTables
from rootlace.runtime.model.rope import RotaryEmbedding
from rootlace.runtime.model.sampler import sample
from rootlace.runtime.model.scores import concatenate, score_tokens
from rootlace.runtime.model.step_input import StepInputBuilder
from rootlace.runtime.scheduler.plan import (
    PromptScoreRow,
    SampleRow,
    StepPlan,
    StepResult,
    TokenScores,
)

LOGITS_BYTES = 64 << 20
"""Logits of scored prompt tokens held at once; a long prompt is scored in parts of this size."""


class ModelRunner:
    """Runs step plans on a decoder (`rootlace.runtime.scheduler.plan.Executor`).

    Between steps nothing is kept but the KV memory and the masks that requests share. `run` is not
    thread-safe.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        kernels: KernelSet,
        inputs: StepInputBuilder,
        cache: torch.Tensor,
        context_length: int,
    ) -> None:
        self.config = config
        self.device = cache.device
        self.dtype = cache.dtype
        self._decoder = decoder
        self._kernels = kernels
        self._inputs = inputs
        self._cache = cache
        self._context_length = context_length
        self._masks = MaskTables(config.vocab_size, cache.device)

    @classmethod
    def load(
        cls,
        executor: ExecutorConfig,
        cache: CacheConfig,
        max_step_tokens: int,
        max_running: int,
        progress: Callable[[str, float], None] | None = None,
    ) -> ModelRunner:
        """Read the model folder and allocate the KV pool.

        `progress(what, fraction)` is called while weights are read. Raises `UnsupportedModel` for
        the folder's faults, `InvalidRequest` for a configuration that does not fit the model or the
        machine.
        """
        if executor.threads is not None:
            torch.set_num_threads(executor.threads)
        device = _device(executor.device)
        config = ModelConfig.read(executor.model)
        dtype = _dtype(executor.dtype, config)
        if device.type == "cuda":
            # float32 means float32: TF32 would round every product to ten bits.
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
        if executor.context_length is not None and not (
            0 < executor.context_length <= config.max_context
        ):
            raise InvalidRequest(
                f"context_length {executor.context_length} is not between 1 and the model's "
                f"{config.max_context} ({config.path / 'config.json'}: max_position_embeddings)"
            )
        with torch.inference_mode():
            rotary = RotaryEmbedding(config, executor.context_length, device, dtype)
            kernels = kernels_for(device)
            weights = load_weights(config, dtype, device, progress)
            num_blocks = kv_pool.choose_num_blocks(
                config,
                cache,
                executor.kv_memory_bytes,
                rotary.context_length,
                device,
                dtype,
                _step_bytes(config, dtype, max_step_tokens, max_running),
            )
            pool = kv_pool.allocate(config, num_blocks, cache.block_size, device, dtype)
        return cls(
            config=config,
            decoder=Decoder(config, weights, kernels),
            kernels=kernels,
            inputs=StepInputBuilder(config, kernels, rotary, cache.block_size, dtype, device),
            cache=pool,
            context_length=rotary.context_length,
        )

    @property
    def num_blocks(self) -> int:
        return self._cache.shape[2]

    @property
    def block_size(self) -> int:
        return self._cache.shape[3]

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def kv_cache(self) -> torch.Tensor:
        """[layers, 2, num_blocks, block_size, kv_heads, head_dim]; for tests and tools."""
        return self._cache

    def new_masks(self, rows: int, words: int) -> np.ndarray:
        """int32 [rows, words], uninitialised: where the masks of a step are best filled."""
        return self._masks.new_masks(rows, words)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step; see `StepPlan` for the order of effects."""
        if len(plan.copies):
            source, target = self._inputs.copies(plan)
            cache = self._cache.view(-1, *self._cache.shape[2:])
            self._kernels.copy_slots(cache, source, target)
        if not plan.num_tokens:
            return StepResult(np.empty(0, dtype=np.int32), [], [])
        hidden = self._decoder.forward(self._inputs.build(plan), self._cache)
        if plan.wait_for_masks is not None:
            plan.wait_for_masks()
        token_ids, scores = self._sample(hidden[: len(plan.samples)], plan.samples)
        prompt_scores = []
        start = len(plan.samples)
        for row in plan.prompt_scores:
            stop = start + len(row.targets)
            prompt_scores.append(self._score_prompt(hidden[start:stop], row))
            start = stop
        return StepResult(token_ids, scores, prompt_scores)

    def _sample(
        self, hidden: torch.Tensor, rows: list[SampleRow]
    ) -> tuple[np.ndarray, list[TokenScores | None]]:
        if not rows:
            return np.empty(0, dtype=np.int32), []
        logits = self._decoder.logits(hidden)
        token_ids = sample(logits, rows, self._kernels, self._masks)
        scores: list[TokenScores | None] = [None] * len(rows)
        asked = [i for i, row in enumerate(rows) if row.params.logprobs]
        if asked:
            most = max(rows[i].params.top_logprobs for i in asked)
            if len(asked) < len(rows):
                logits = logits.index_select(0, torch.tensor(asked, device=logits.device))
            found = score_tokens(logits, token_ids[asked], most)
            for j, i in enumerate(asked):
                top = rows[i].params.top_logprobs
                scores[i] = TokenScores(
                    found.logprobs[j : j + 1],
                    found.top_ids[j : j + 1, :top],
                    found.top_logprobs[j : j + 1, :top],
                )
        return token_ids, scores

    def _score_prompt(self, hidden: torch.Tensor, row: PromptScoreRow) -> TokenScores:
        """In parts, so that memory does not grow with the prompt."""
        size = max(LOGITS_BYTES // (4 * self.config.vocab_size), 1)
        parts = [
            score_tokens(
                self._decoder.logits(hidden[start : start + size]),
                row.targets[start : start + size],
                row.top_logprobs,
            )
            for start in range(0, len(row.targets), size)
        ]
        return concatenate(parts, row.top_logprobs)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"device {name!r}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device {name!r} is not supported, only cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device {name!r}: this torch build or machine has no CUDA")
    return device


def _dtype(name: str, config: ModelConfig) -> torch.dtype:
    """`auto` is the checkpoint's type; float16 and float64 ones run in float32."""
    if name == "auto":
        stored = checkpoint_dtype(config)
        return stored if stored == torch.bfloat16 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _step_bytes(
    config: ModelConfig, dtype: torch.dtype, max_step_tokens: int, max_running: int
) -> int:
    """A generous estimate of a step's largest temporaries: activations, logits, sampling."""
    width = 6 * config.hidden_size + 4 * config.intermediate_size
    width += 4 * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    activations = max_step_tokens * width * max(dtype.itemsize, 4)
    # float32 logits, their float64 weights and ranking keys.
    sampling = max_running * config.vocab_size * 32
    return activations + sampling + 2 * LOGITS_BYTES + (256 << 20)
