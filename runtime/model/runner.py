"""The model runner: the executor that has a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from rootlace.runtime.model.plain_steps import LOGITS_BYTES, PlainStep, PlainSteps
from rootlace.runtime.model.rope import RotaryEmbedding
from rootlace.runtime.model.step_input import StepInputBuilder
from rootlace.runtime.model.weights import ModelWeights
from rootlace.runtime.scheduler.plan import SampleRow, StepPlan, StepResult

Progress = Callable[[str, float], None]
LoadWeights = Callable[[ModelConfig, torch.dtype, torch.device, Progress | None], ModelWeights]


class ModelRunner:
    """Runs step plans on a decoder (`rootlace.runtime.scheduler.plan.Executor`).

    Between steps nothing is kept but the KV memory, the tokens found last and the masks that
    requests share. Not thread-safe.
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
        self._cache = cache
        self._context_length = context_length
        self._masks = MaskTables(config.vocab_size, cache.device)
        self._steps = PlainSteps(decoder, kernels, inputs, cache, self._masks)

    @classmethod
    def load(
        cls,
        executor: ExecutorConfig,
        cache: CacheConfig,
        max_step_tokens: int,
        max_running: int,
        progress: Progress | None = None,
        weights_of: LoadWeights = load_weights,
    ) -> ModelRunner:
        """Read the model folder and allocate the KV pool.

        `progress(what, fraction)` is called while weights are read. `weights_of` gets the weights;
        whoever measures a shape may make them up, then the folder holds `config.json` alone. Raises
        `UnsupportedModel` for the folder's faults, `InvalidRequest` for a configuration that does
        not fit the model or the machine.
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
            weights = weights_of(config, dtype, device, progress)
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

    # ------------------------------------------------------------ steps

    @property
    def overlaps(self) -> bool:
        return self._steps.overlaps

    def launch(self, plan: StepPlan) -> PlainStep:
        """Begin a step; see `StepPlan` for the order of effects."""
        return self._steps.launch(plan)

    def sample(self, launched: PlainStep, samples: Sequence[SampleRow]) -> None:
        """Let a late plan's step end."""
        self._steps.sample(launched, samples)

    def collect(self, launched: PlainStep) -> StepResult:
        """Wait for a step's result. Raises what running it raised."""
        return self._steps.collect(launched)

    def run(self, plan: StepPlan) -> StepResult:
        """A step from beginning to end. Raises ValueError for a late plan, which follows
        another."""
        if plan.late:
            raise ValueError("a late plan cannot be run alone")
        return self.collect(self.launch(plan))


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
