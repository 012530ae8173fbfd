"""Run steps on a device beside the host: launched ahead, sampled there, collected later.

One stream runs all operations, in order; only `collect` waits for the device. A step's tokens stay
on the device for the next step: `StepPlan.feeds` gathers the tokens, `SampleRow.source` samples on
from one.

A step of decode rows alone runs through graphs. One graph does forward pass and sampling together.
Two graphs are used if the host has work in between: filling masks during the forward pass, or late
rows. All other steps are launched kernel by kernel; they have more tokens, so that the device takes
longer than the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from rootlace.kernels.dispatch import kernels_for, with_reference
from rootlace.kernels.reference import REFERENCE
from rootlace.runtime.contracts.plan import (
    MAX_DRAFTED,
    ExecutorLost,
    PromptScoreRow,
    SampleRow,
    StepPlan,
    StepResult,
    TokenScores,
)
from rootlace.runtime.model import kv_pool
from rootlace.runtime.model.automaton_table import arena_for
from rootlace.runtime.model.decoder.interface import StepDecoder, StepInputBuilder
from rootlace.runtime.model.executor.refusals import check_gpu_kernels
from rootlace.runtime.model.executor.staging import (
    CudaDevice,
    DecodeStaging,
    Graphs,
    HostBuffers,
    MixedStaging,
    Results,
    StagedDecode,
    decode_buckets,
)
from rootlace.runtime.model.executor.steps import ModelSetup, Steps
from rootlace.runtime.model.executor.torch_setup import allocate_on, decoder_of, inputs_of
from rootlace.runtime.model.kv_pool import free_memory, kv_bytes, measured, trial_steps
from rootlace.runtime.model.sampler import (
    Sampler,
    SamplingPlan,
    of_prompts,
    of_samples,
    score_in_parts,
)
from rootlace.wire.errors import InvalidRequest

FIRST_HOST_BYTES = 1 << 20
PREPARED_KINDS = 2
"""Kinds of sampling whose graphs are captured while there is no work."""

log = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """Content of a graph: the forward pass, sampling of a kind, or both, for `rows` rows."""

    rows: int
    forward: bool
    sampling: object


@dataclass(slots=True, eq=False)
class DeviceStep:
    """Step in progress."""

    plan: StepPlan
    late: bool
    rows: int = 0
    """Number of rows that logits are padded to; 0: the number of samples."""
    sampled: bool = False
    sampling: SamplingPlan | None = None
    """Host work of sampling, if done before the forward pass was launched."""
    hidden: torch.Tensor | None = None
    """Hidden states of the prompt tokens to score."""
    pooled: list[torch.Tensor] = field(default_factory=list)
    targets: torch.Tensor | None = None
    samples: Sequence[SampleRow] = ()
    fetched: Callable[[], list[np.ndarray]] | None = None
    parts: list[str] = field(default_factory=list)
    """Name of each fetched tensor."""
    error: Exception | None = None


class DeviceSteps(Steps):
    """Steps on a device: see `Executor`. Not thread-safe."""

    overlaps = True

    def __init__(
        self,
        device: CudaDevice,
        decoder: StepDecoder,
        inputs: StepInputBuilder,
        cache: torch.Tensor,
        sampler: Sampler,
        graphs: Graphs,
        *,
        max_rows: int,
        max_blocks: int,
        scratch_block: int,
        fixed: bool = True,
    ) -> None:
        """`cache` includes `scratch_block`, a block that no plan uses. `max_blocks`: entries of the
        longest block table. `fixed`: the kernels can plan attention for captured graphs."""
        self._device = device
        self._decoder = decoder
        self._kernels = inputs.kernels
        self._cache = cache
        self._sampler = sampler
        self.graphs = graphs
        self.eager_steps = 0
        self.automaton_rows = 0
        where = device.device
        max_tokens = max_rows + MAX_DRAFTED
        with torch.inference_mode(), device.work():
            self._tokens = torch.full((max_tokens,), -1, dtype=torch.int32, device=where)
            self._logprobs = torch.zeros(max_tokens, dtype=torch.float32, device=where)
            self._logits = torch.zeros(
                max_tokens, decoder.spec.vocab_size, dtype=decoder.dtype, device=where
            )
            buffers = HostBuffers(device, FIRST_HOST_BYTES)
            self._mixed = MixedStaging(inputs, buffers)
            self._decode: DecodeStaging | None = None
            if fixed:
                scratch_slot = scratch_block * inputs.block_size
                self._decode = DecodeStaging(inputs, buffers, max_rows, max_blocks, scratch_slot)
        self._results = Results(device)
        self._last: DeviceStep | None = None
        self._kinds: dict[Hashable, SamplingPlan] = {}
        self._remember(sampler.plan([], 1))

    # ------------------------------------------------------------ the executor

    def launch(self, plan: StepPlan) -> DeviceStep:
        """Launch the step, a late plan's only up to sampling. `collect` raises errors."""
        step = DeviceStep(plan, plan.late)
        last, self._last = self._last, step
        try:
            _check_order(last, plan)
            with torch.inference_mode(), self._device.work():
                self._begin(step)
                if not step.late:
                    self._end(step, plan.samples)
        except Exception as error:
            step.error = error
        return step

    def sample(self, step: DeviceStep, samples: Sequence[SampleRow]) -> None:
        """End the step of a late plan. `collect` raises errors."""
        if step.error is not None:
            return
        try:
            with torch.inference_mode(), self._device.work():
                self._end(step, samples)
        except Exception as error:
            step.error = error

    def collect(self, step: DeviceStep) -> StepResult:
        """Wait for the step's results, not for later steps."""
        try:
            if step.error is not None:
                raise step.error
            if step.fetched is None:
                raise RuntimeError("a late plan is to be sampled before its result is collected")
            found = dict(zip(step.parts, step.fetched(), strict=True))
        except Exception as error:
            step.error = error
            _raise_if_lost(self._device, error)
            raise
        return StepResult(
            found.get("tokens", np.empty(0, np.int32)),
            _sample_scores(step.samples, found),
            _prompt_scores(step.plan.prompt_scores, found),
            [found[f"pooled {at}"] for at in range(len(step.plan.pooled))],
        )

    def stats(self) -> dict[str, int | float]:
        count = self.graphs.count
        return {
            "graphs_captured": count.captured,
            "graphs_dropped": count.dropped,
            "graphs_failed": count.failed,
            "graph_capture_seconds": count.seconds,
            "graph_replays": count.replayed,
            "eager_steps": self.eager_steps,
            "automaton_rows": self.automaton_rows,
        }

    def work(self) -> AbstractContextManager[object]:
        return self._device.work()

    def prepare(self) -> bool:
        """Capture the next missing graph of a whole step, of the kinds used last; False: none.

        Raises nothing but `ExecutorLost`: no request asked for a capture, so none may fail by it.
        """
        if self._decode is None or not self.graphs.enabled:
            return False
        for kind, plan in reversed(self._kinds.items()):
            for rows in self._decode.buckets:
                key = GraphKey(rows, True, kind)
                if self.graphs.missing([key]):
                    self._prepare(self._decode, key, plan)
                    return True
        return False

    def _prepare(self, decode: DecodeStaging, key: GraphKey, plan: SamplingPlan) -> None:
        try:
            done = self._capture(decode, key, self._sampler.plan_like(plan, key.rows))
        except Exception as error:
            _raise_if_lost(self._device, error)
            log.warning("%s could not be prepared", key, exc_info=True)
            done = False
        if not done:
            self.graphs.give_up(key)

    def _capture(self, decode: DecodeStaging, key: GraphKey, sampling: SamplingPlan) -> bool:
        """Capture a whole step of empty rows. The results of the step launched last are lost.
        False: the step has no fixed form."""
        self._last = None
        with torch.inference_mode(), self._device.work():
            staged = decode.stage(_empty_plan(), key.rows, sampling.arrays)
            if staged is None or staged.sampling is None:
                return False

            def work() -> None:
                self._whole(staged, sampling)

            work()  # kernel by kernel once: what is compiled at first use cannot be captured
            self.graphs.capture(key, work)
        return True

    # ------------------------------------------------------------ parts of a step

    def _begin(self, step: DeviceStep) -> None:
        """Copy blocks, and run the forward pass up to logits; sample decode rows if possible."""
        plan = step.plan
        at_once = not step.late and plan.wait_for_masks is None
        rows = None if self._decode is None else self._decode.rows_for(plan)
        if rows is None or not self._decode_step(step, rows, at_once):
            self._mixed_step(step)

    def _decode_step(self, step: DeviceStep, rows: int, at_once: bool) -> bool:
        """Run a step of decode rows; False: the step has no fixed form."""
        assert self._decode is not None
        plan = step.plan
        in_order = [sample.row for sample in plan.samples] == list(range(len(plan.samples)))
        sampling = None
        if at_once and in_order and plan.samples:
            sampling = self._sampler.plan(plan.samples, rows)
        whole = sampling is not None and sampling.kind is not None
        staged = self._decode.stage(plan, rows, sampling.arrays if sampling and whole else {})
        if staged is None:
            return False
        self._copy_blocks(plan)
        if sampling is not None and whole and staged.sampling is not None:
            chosen = sampling
            self._remember(chosen)
            self._run(GraphKey(rows, True, chosen.kind), lambda: self._whole(staged, chosen))
            step.sampled = True
        else:
            step.sampling = sampling
            self._run(GraphKey(rows, True, None), lambda: self._forward(staged))
        if in_order:
            step.rows = rows
        else:
            wanted = np.array([sample.row for sample in plan.samples], np.int64)
            sent = self._mixed.send({"wanted": wanted})
            chosen_logits = self._logits.index_select(0, sent["wanted"])
            self._logits[: len(wanted)].copy_(chosen_logits)
        return True

    def _mixed_step(self, step: DeviceStep) -> None:
        plan = step.plan
        self.eager_steps += 1
        if not plan.num_tokens:
            self._copy_blocks(plan)
            return
        count = len(plan.samples)
        inputs, staged = self._mixed.stage(plan, self._tokens)
        if "copy_source" in staged:
            self._copy(staged)
        hidden = self._decoder.forward(inputs, self._cache)
        if count:
            self._decoder.write_logits(hidden[:count], self._logits[:count])
        pooling = len(hidden) - sum(row.count for row in plan.pooled)
        if plan.prompt_scores:
            step.hidden, step.targets = hidden[count:pooling], staged["targets"]
        for row in plan.pooled:
            part, pooling = hidden[pooling : pooling + row.count], pooling + row.count
            # The scores' memory may serve the decoder again.
            scored = self._decoder.logits(part).clone() if row.labels else None
            step.pooled.append(part.float() if scored is None else scored)

    def _end(self, step: DeviceStep, samples: Sequence[SampleRow]) -> None:
        """Sample, unless done, and begin to fetch the results."""
        plan = step.plan
        step.samples = samples
        if plan.wait_for_masks is not None:
            plan.wait_for_masks()
        if samples and not step.sampled:
            self._sample(step, samples)
            step.sampled = True
        self.automaton_rows += sum(
            row.mask is None and row.automaton is not None for row in samples
        )
        parts = self._scored(step)
        if samples:
            parts["tokens"] = self._tokens[: len(samples)]
            if any(row.params.logprobs for row in samples):
                parts["logprobs"] = self._logprobs[: len(samples)]
        parts |= {f"pooled {at}": part for at, part in enumerate(step.pooled)}
        step.parts = list(parts)
        step.fetched = self._results.fetch(list(parts.values()))
        step.hidden = step.targets = None
        step.pooled = []

    def _sample(self, step: DeviceStep, samples: Sequence[SampleRow]) -> None:
        """Sample from the step's logits; from padded ones by a captured graph where one exists."""
        rows = step.rows
        sampling = step.sampling or self._sampler.plan(samples, rows or len(samples))
        if rows and sampling.kind is not None:
            assert self._decode is not None
            places = self._decode.stage_sampling(rows, sampling.arrays)
            if places is not None:
                arrays = self._decode.sampling_tensors(places)
                self._run(
                    GraphKey(rows, False, sampling.kind),
                    lambda: self._sampler.run(
                        sampling, self._logits[:rows], arrays, self._tokens, self._logprobs
                    ),
                )
                return
        sent = self._mixed.send(sampling.arrays)
        arrays = {name: sent[name] for name in sampling.arrays}
        count = rows or len(samples)
        self._sampler.run(sampling, self._logits[:count], arrays, self._tokens, self._logprobs)

    def _scored(self, step: DeviceStep) -> dict[str, torch.Tensor]:
        """Compute scores besides sampling: alternatives, and tokens of the prompt."""
        parts: dict[str, torch.Tensor] = {}
        vocab_size = self._decoder.spec.vocab_size
        scored = (row.params for row in step.samples if row.params.logprobs)
        top = max((params.top_logprobs for params in scored), default=0)
        score = self._kernels.score_tokens
        if top:
            tokens = self._tokens[: len(step.samples)]
            _, ids, logprobs = score_in_parts(
                score, self._logits.__getitem__, tokens, top, vocab_size, torch.cat
            )
            parts["top_ids"], parts["top_logprobs"] = ids, logprobs
        hidden, targets = step.hidden, step.targets
        if hidden is not None and targets is not None:
            top = max(row.top_logprobs for row in step.plan.prompt_scores)
            found = score_in_parts(
                score,
                lambda part: self._decoder.logits(hidden[part]),
                *(targets, top, vocab_size, torch.cat),
            )
            parts |= zip(_PROMPT, found, strict=True)
        return parts

    # ------------------------------------------------------------ what graphs are captured of

    def _run(self, key: GraphKey, work: Callable[[], None]) -> None:
        if not self.graphs.run(key, work):
            self.eager_steps += key.forward

    def _whole(self, staged: StagedDecode, sampling: SamplingPlan) -> None:
        assert self._decode is not None and staged.sampling is not None
        self._forward(staged)
        arrays = self._decode.sampling_tensors(staged.sampling)
        logits = self._logits[: staged.bucket.rows]
        self._sampler.run(sampling, logits, arrays, self._tokens, self._logprobs)

    def _forward(self, staged: StagedDecode) -> None:
        assert self._decode is not None
        inputs = self._decode.step_input(staged, self._tokens)
        hidden = self._decoder.forward(inputs, self._cache)
        self._decoder.write_logits(hidden, self._logits[: staged.bucket.rows])

    def _remember(self, sampling: SamplingPlan) -> None:
        """Remember a kind of sampling, for which graphs are then prepared."""
        self._kinds.pop(sampling.kind, None)
        self._kinds[sampling.kind] = sampling
        if len(self._kinds) > PREPARED_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def _copy_blocks(self, plan: StepPlan) -> None:
        if copies := self._mixed.copies(plan):
            self._copy(self._mixed.send(copies))

    def _copy(self, sent: dict[str, torch.Tensor]) -> None:
        cache = self._cache.view(-1, *self._cache.shape[2:])
        self._kernels.copy_slots(cache, sent["copy_source"], sent["copy_target"])


_PROMPT = ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs")


def _raise_if_lost(device: CudaDevice, error: Exception) -> None:
    """Raise `ExecutorLost` if a kernel's fault, which any later call may meet, ended the device."""
    if not device.works():
        raise ExecutorLost(f"{device.device} is lost: {error!r}") from error


def _check_order(last: DeviceStep | None, plan: StepPlan) -> None:
    """Raise RuntimeError if the tokens that `plan` continues from are missing."""
    if last is not None and last.error is None and last.late and not last.sampled:
        raise RuntimeError("a late plan is to be sampled before the next one is launched")
    follows = len(plan.feeds) or any(row.source >= 0 for row in plan.samples)
    if follows and (last is None or last.error is not None):
        raise RuntimeError("the step before failed, or there was none: its tokens are unknown")


def _sample_scores(
    samples: Sequence[SampleRow], scores: dict[str, np.ndarray]
) -> list[TokenScores | None]:
    if "logprobs" not in scores:
        return [None] * len(samples)
    none = np.empty((len(samples), 0), np.int32)
    top_ids = scores.get("top_ids", none)
    top_logprobs = scores.get("top_logprobs", none.astype(np.float32))
    return of_samples(samples, scores["logprobs"], top_ids, top_logprobs)


def _prompt_scores(
    rows: Sequence[PromptScoreRow], scores: dict[str, np.ndarray]
) -> list[TokenScores]:
    return of_prompts(rows, *(scores[name] for name in _PROMPT)) if rows else []


def _empty_plan() -> StepPlan:
    """Build a step of no rows, for captures: padded, it runs as any step does, without results."""
    none = np.empty(0, np.int32)
    return StepPlan(
        step=0,
        token_ids=none,
        positions=none,
        slots=none.astype(np.int64),
        row_start=np.zeros(1, np.int32),
        context_len=none,
        block_tables=np.zeros((0, 1), np.int32),
    )


KINDS = PREPARED_KINDS + 1
"""Kinds of steps with graphs for every bucket: more than the prepared kinds."""


class GpuModel(msgspec.Struct, frozen=True):
    """Model whose weights are on its device."""

    setup: ModelSetup
    decoder: StepDecoder
    inputs: StepInputBuilder


@torch.inference_mode()
def load_on_gpu(
    setup: ModelSetup, max_tokens: int, max_rows: int
) -> tuple[DeviceSteps, torch.Tensor, str]:
    """Load a model; return the executor's steps, the KV pool, and the name of the kernels."""
    torch.cuda.set_device(torch.device(setup.device))  # kernels are launched on this device
    model = load(setup)
    steps, pool = on_gpu(model, max_tokens, max_rows)
    return steps, pool, model.inputs.kernels.name


def load(setup: ModelSetup) -> GpuModel:
    """Put the weights on the device. Raises `InvalidRequest` if the requested kernels are not a
    GPU's, or if `reference_for` names an unknown operation."""
    executor, device = setup.executor, torch.device(setup.device)
    check_gpu_kernels(executor.kernels, device)
    if executor.threads is not None:
        torch.set_num_threads(executor.threads)
    # float32 means float32: TF32 would round every product to ten bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    kernels = REFERENCE if executor.kernels == "reference" else kernels_for(device)
    try:
        kernels = with_reference(kernels, executor.reference_for)
    except ValueError as error:
        raise InvalidRequest(f"reference_for: {error}") from error
    if setup.config.spec.attention.latent is not None and kernels is not REFERENCE:
        log.warning("%s: the reference kernels run: others have no latent attention", device)
        kernels = REFERENCE
    return GpuModel(setup, decoder_of(setup, kernels), inputs_of(setup, kernels))


def on_gpu(model: GpuModel, max_tokens: int, max_rows: int) -> tuple[DeviceSteps, torch.Tensor]:
    """Return the executor's steps, of at most `max_tokens` tokens and `max_rows` rows, and the KV
    pool (see `kv_pool.allocate`; without the block for padding).

    Runs the largest steps once, on a small pool: so kernels are compiled and libraries set up
    before the first request, and the steps' memory is measured.
    """
    setup = model.setup
    device, cache = torch.device(setup.device), setup.cache
    cuda = CudaDevice(device)
    # The host must know a step's experts, and transformers' modules may have any experts:
    # such steps cannot be captured.
    spec = setup.config.spec
    graphs = setup.executor.cuda_graphs and spec.experts is None and spec.transformers is None
    most_graphs = KINDS * len(decode_buckets(max_rows)) if graphs else 0
    with cuda.work():
        try:
            step_bytes = _step_bytes(model, cuda, max_tokens, max_rows)
        except torch.OutOfMemoryError as error:
            raise InvalidRequest(
                f"{setup.config.path}: beside the weights {device} has no memory for a step of "
                f"{max_tokens} tokens and {max_rows} rows: lower max_step_tokens or "
                "max_running"
            ) from error

        def left() -> int:
            free, total = free_memory(device)
            kv_memory = kv_bytes(free, total, step_bytes, most_graphs)
            log.info(
                "memory: %d MiB free beside the weights, %d for a step, %d for the KV cache",
                *(value >> 20 for value in (free, step_bytes, kv_memory)),
            )
            return kv_memory

        num_blocks = setup.choose_num_blocks(left)
        try:
            steps, pool = _steps(model, cuda, max_rows, num_blocks, most_graphs)
        except torch.OutOfMemoryError as error:
            raise InvalidRequest(
                f"{device} has no memory for a KV cache of {num_blocks} blocks of "
                f"{cache.block_size} tokens"
            ) from error
    return steps, pool[:, :, :num_blocks]


def _steps(
    model: GpuModel, cuda: CudaDevice, max_rows: int, num_blocks: int, most_graphs: int
) -> tuple[DeviceSteps, torch.Tensor]:
    """Build steps on a new pool, with a block more than plans may use."""
    setup, device, block_size = model.setup, cuda.device, model.setup.cache.block_size
    vocab_size = setup.config.spec.vocab_size
    arena = arena_for(vocab_size, max_rows + MAX_DRAFTED, device)
    pool = allocate_on(device, setup.config, num_blocks + 1, block_size, setup.kv_dtype)
    steps = DeviceSteps(
        cuda,
        model.decoder,
        model.inputs,
        pool,
        Sampler(vocab_size, model.inputs.kernels, arena),
        Graphs(cuda, most_graphs > 0, most_graphs),
        max_rows=max_rows,
        max_blocks=-(-setup.context_length // block_size),
        scratch_block=num_blocks,
        # Launches of the reference's attention depend on the step.
        fixed=model.inputs.kernels.plan_attention is not REFERENCE.plan_attention,
    )
    return steps, pool


def _step_bytes(model: GpuModel, cuda: CudaDevice, max_tokens: int, max_rows: int) -> int:
    """Measure the peak memory of steps and of their buffers, in bytes, without the KV pool."""
    setup, block_size = model.setup, model.setup.cache.block_size
    plans, blocks = trial_steps(
        setup.config.spec.vocab_size, max_tokens, max_rows, setup.context_length, block_size
    )

    def run() -> None:
        steps, _ = _steps(model, cuda, max_rows, blocks, most_graphs=0)
        for plan in plans:
            steps.collect(steps.launch(plan))

    used = measured(run, cuda.device)
    pool = (blocks + 1) * kv_pool.block_bytes(setup.config, block_size, setup.kv_dtype)
    return max(used - pool, 0)
