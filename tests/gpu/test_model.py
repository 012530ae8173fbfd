"""Whole models on the device: transformers' tokens, however the work is cut and launched."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from rootlace.kernels.native.packed import BFLOAT16
from rootlace.kernels.reference.layers import INT4, INT8, ROWS, dequantise, quantise
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.protocol import SamplingParams
from tests.engine.harness import Harness, greedy
from tests.model.checkpoints import SHAPE, configs, reference, save
from tests.model.plans import Blocks, Row, Work, make_plan

BLOCK_SIZE = 16
WIDE = {
    **SHAPE,
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
CONFIGS = {
    "llama": lambda: configs()["llama"],
    "llama-biased": lambda: configs()["llama-biased"],
    "llama-mqa": lambda: configs()["llama-mqa"],  # heads of 24
    "mistral-sliding": lambda: configs()["mistral-sliding"],
    "qwen2-sliding": lambda: configs()["qwen2-sliding"],
    "qwen3": lambda: configs()["qwen3"],
    "wide": lambda: LlamaConfig(**WIDE),
    "wide-qwen3": lambda: Qwen3Config(**{**WIDE, "head_dim": 128}),
}


@dataclass(frozen=True)
class Model:
    name: str
    folder: Path
    hf: PreTrainedModel | None
    device: torch.device

    @property
    def vocab(self) -> int:
        assert self.hf is not None
        return int(self.hf.config.vocab_size)

    def runner(self, **options: Any) -> ModelRunner:
        settings = {"dtype": "float32", **options}
        return ModelRunner.load(
            ExecutorConfig(model=str(self.folder), device=str(self.device), **settings),
            CacheConfig(block_size=BLOCK_SIZE, num_blocks=512),
            max_step_tokens=512,
            max_running=32,
        )

    def greedy_tokens(self, prompt: list[int], count: int) -> tuple[list[int], list[float], float]:
        """transformers' own: tokens, their log-probabilities, the smallest lead of a first choice
        over the second."""
        assert self.hf is not None
        ids = torch.tensor([prompt], device=self.device)
        tokens, logprobs, margin = [], [], float("inf")
        with torch.inference_mode():
            for _ in range(count):
                scores = self.hf(ids, use_cache=False).logits[0, -1].double().log_softmax(-1)
                best, places = scores.topk(2)
                tokens.append(int(places[0]))
                logprobs.append(float(best[0]))
                margin = min(margin, float(best[0] - best[1]))
                ids = torch.cat([ids, places[:1].view(1, 1)], 1)
        return tokens, logprobs, margin

    def prompts(self) -> list[list[int]]:
        """Two families with a common prefix, one prompt inside another, strangers."""
        generator = torch.Generator().manual_seed(3)

        def ids(count: int) -> list[int]:
            return torch.randint(3, self.vocab, (count,), generator=generator).tolist()

        first, second = ids(37), ids(70)
        families = [first + ids(5), first + ids(9), first, second + ids(3), second + ids(20)]
        return [*families, ids(8), ids(1)]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(
    request: pytest.FixtureRequest, device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    return Model(
        request.param, folder, exact_model(CONFIGS[request.param](), folder, device), device
    )


@pytest.fixture(scope="module")
def wide(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("wide")
    return Model("wide", folder, exact_model(LlamaConfig(**WIDE), folder, device), device)


def exact_model(config: PreTrainedConfig, folder: Path, device: torch.device) -> PreTrainedModel:
    """Written to `folder`, in float32, with attention spelled out: a fused one may round more."""
    found = save(config, folder).to(device)
    found.set_attn_implementation("eager")
    return found


def serve(
    runner: ModelRunner,
    prompts: list[list[int]],
    params: Callable[[int], SamplingParams],
    *,
    overlap: bool = False,
    **options: Any,
) -> Harness:
    """The same requests twice, cold and warm."""
    harness = Harness(runner, block_size=BLOCK_SIZE, overlap=overlap, automata=overlap, **options)
    for round_number in range(2):
        for i, prompt in enumerate(prompts):
            harness.add(prompt, params(i), program=str(round_number))
        harness.finish()
    return harness


def outcomes(harness: Harness) -> list[tuple[list[int], str | None]]:
    return [(o.token_ids, o.finish) for o in harness.outcomes.values()]


SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "overlapped": {"overlap": True},
    "chunked": {"max_step_tokens": 11},
    "starved": {"num_blocks": 20},
    "uncached": {"enabled": False},
}


def test_greedy_tokens_are_transformers_own(model: Model, real: bool) -> None:
    check_greedy(model, real, SCHEDULES)


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_greedy_tokens_are_those_of_the_rounded_weights(
    codes: str, device: torch.device, real: bool, tmp_path: Path
) -> None:
    hf = exact_model(sized(real), tmp_path, device)
    for name, module in hf.named_modules():
        if isinstance(module, torch.nn.Linear):
            scheme = INT8 if codes == "int8" or name.endswith("v_proj") else INT4
            scheme = ROWS if codes == "int4" and name == "lm_head" else scheme
            numbers = dequantise(quantise(module.weight.data, scheme))
            module.weight = torch.nn.Parameter(numbers, requires_grad=False)
    schedules = {name: SCHEDULES[name] for name in ("overlapped", "chunked")}
    check_greedy(Model("rounded", tmp_path, hf, device), real, schedules, quantize=codes)


def sized(real: bool) -> LlamaConfig:
    """The wide configuration, on a CPU a narrow one of whole groups of inputs."""
    small = {**SHAPE, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaConfig(**(WIDE if real else small))


def check_greedy(
    model: Model, real: bool, schedules: dict[str, dict[str, Any]], **options: Any
) -> None:
    """float32: exactly, cold and warm, whatever the schedule; log-probabilities to 5e-4."""
    new = 24 if real else 6
    prompts = model.prompts()
    expected = [model.greedy_tokens(prompt, new) for prompt in prompts]
    # Where two tokens are all but equal, neither is wrong.
    kept = [i for i, (_, _, margin) in enumerate(expected) if margin > 1e-3]
    assert len(kept) >= len(prompts) - 3
    runner = model.runner(**options)
    for name, setting in schedules.items():
        harness = serve(
            runner, prompts, lambda _: greedy(new, logprobs=True, ignore_eos=True), **setting
        )
        for rid, outcome in harness.outcomes.items():
            if rid % len(prompts) not in kept:
                continue
            tokens, logprobs, _ = expected[rid % len(prompts)]
            where = f"{name}, {'warm' if rid >= len(prompts) else 'cold'}"
            assert outcome.token_ids == tokens, where
            assert outcome.logprobs == pytest.approx(logprobs, abs=5e-4), where
        stats = harness.scheduler.stats()
        assert (stats["cached_tokens"] > 0) == (name != "uncached")
    if real:
        counted = runner.stats()
        assert counted["graph_replays"] > 0 and counted["graphs_failed"] == 0


def test_graphs_and_overlap_change_nothing(wide: Model, real: bool) -> None:
    """Sampled with seeds, with log-probabilities: the same tokens, the same numbers."""
    new = 40 if real else 8
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 30, "min_p": 0.02},
        {"temperature": 0.7, "repetition_penalty": 1.2},
        {"temperature": 1.0, "logprobs": True, "top_logprobs": 3},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {5: 4.0}},
    ]

    def params(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=new, seed=i, ignore_eos=True, **settings[i])  # type: ignore[arg-type]

    found = {}
    for graphs in (True, False):
        runner = wide.runner(cuda_graphs=graphs)
        for overlap in (False, True):
            harness = serve(runner, wide.prompts(), params, overlap=overlap)
            found[graphs, overlap] = harness
        if real:
            assert (runner.stats()["graph_replays"] > 0) == graphs
    first = found[True, True]
    for harness in found.values():
        assert outcomes(harness) == outcomes(first)
        for one, other in zip(harness.outcomes.values(), first.outcomes.values(), strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=5e-4)
            assert [ids for ids, _ in one.top] == [ids for ids, _ in other.top]


def prompt_logprobs(runner: ModelRunner, token_ids: list[int]) -> np.ndarray:
    """Of all tokens but the first, in chunks of uneven sizes, then one by one."""
    row = Row(Blocks(runner.num_blocks, BLOCK_SIZE), token_ids)
    parts = []
    for count in (33, 100, 7):
        parts += runner.run(make_plan([Work(row, count, score_from=1)])).prompt_scores
    while row.computed < len(token_ids) - 1:
        parts += runner.run(make_plan([Work(row, 1, score_from=1)])).prompt_scores
    return np.concatenate([part.logprobs for part in parts])


def transformers_logprobs(model: PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    ids = torch.tensor([token_ids], device=model.device)
    with torch.inference_mode():
        scores = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
    return scores[:-1].gather(1, ids[0, 1:, None]).squeeze(1).cpu().numpy()


def test_bfloat16_is_as_near_to_float32_as_transformers(
    wide: Model, tmp_path: Path, device: torch.device
) -> None:
    theirs = save(LlamaConfig(**WIDE), tmp_path, dtype=torch.bfloat16).to(device)
    exactly = reference(tmp_path, torch.float32).to(device)
    exactly.set_attn_implementation("eager")
    ours = Model("bf16", tmp_path, theirs, device).runner(dtype="bfloat16")
    assert ours.dtype == BFLOAT16
    their_errors, our_errors = [], []
    for seed in range(3):
        ids = np.random.default_rng(seed).integers(3, wide.vocab, 180).tolist()
        exact = transformers_logprobs(exactly, ids)
        their_errors.append(np.abs(transformers_logprobs(theirs, ids) - exact))
        our_errors.append(np.abs(prompt_logprobs(ours, ids) - exact))
    assert np.mean(our_errors) <= 1.2 * np.mean(their_errors)
    assert np.max(our_errors) <= 2 * np.max(their_errors)


TEXT = (
    "Mara Olsen is 34 years old and lives in Turin. She works as a baker and has two cats. Her "
    "brother Jon is a teacher; he is younger than she is, and lives in Oslo with his family."
)


def test_an_fp8_cache_is_near(demo_model: Path, device: torch.device) -> None:
    """Keys and values have 3 bits of mantissa instead of bfloat16's 7, 16 times coarser: what comes
    of that is less than 10 times what bfloat16 throughout costs (6 times, on a CPU)."""
    ids = AutoTokenizer.from_pretrained(demo_model)(TEXT * 4)["input_ids"][:180]
    model = Model("demo", demo_model, None, device)
    exact = prompt_logprobs(model.runner(dtype="float32"), ids)
    # On a CPU the native kernels, which have no such cache, round less than those that serve it.
    same = {"kernels": "reference"} if device.type == "cpu" else {}
    rounded = np.abs(prompt_logprobs(model.runner(dtype="bfloat16", **same), ids) - exact)
    for dtype in ("float32", "bfloat16"):
        runner = model.runner(dtype=dtype, kv_dtype="fp8_e4m3")
        assert runner.kv_cache.dtype == torch.float8_e4m3fn
        error = np.abs(prompt_logprobs(runner, ids) - exact)
        assert np.isfinite(error).all()
        assert 0 < error.mean() < 10 * rounded.mean(), dtype
        prompts = [ids[:40], ids[:60]]
        harness = serve(runner, prompts, lambda _: greedy(8, ignore_eos=True), overlap=True)
        assert all(len(o.token_ids) == 8 for o in harness.outcomes.values())


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_a_cache_of_integers_is_the_references(
    codes: str, device: torch.device, real: bool, tmp_path: Path
) -> None:
    """With weights of integers, too. Few numbers get another code where they lie between two, so
    what kernels differ in is a small part of what the cache costs; then come graphs and overlap."""
    hf = exact_model(sized(real), tmp_path, device)
    model = Model("integers", tmp_path, hf, device)
    both = {"quantize": codes, "kv_dtype": codes}
    ours, theirs = model.runner(**both), model.runner(**both, kernels="reference")
    assert ours.kernels != theirs.kernels == "reference"
    assert ours.kv_cache.dtype == torch.uint8
    ids = np.random.default_rng(0).integers(3, model.vocab, 180).tolist()
    expected = prompt_logprobs(theirs, ids)
    cost = np.abs(prompt_logprobs(model.runner(quantize=codes), ids) - expected)
    error = np.abs(prompt_logprobs(ours, ids) - expected)
    assert error.mean() < 0.05 * cost.mean() and error.max() < 0.5 * cost.max()

    def params(_: int) -> SamplingParams:
        return greedy(24 if real else 6, ignore_eos=True, logprobs=True, top_logprobs=2)

    found, wanted = (serve(one, model.prompts(), params, overlap=True) for one in (ours, theirs))
    margin = max(1e-3, 5 * float(error.max()))
    total = compared = 0
    for one, other in zip(found.outcomes.values(), wanted.outcomes.values(), strict=True):
        # Up to where two tokens are all but equal: there either may come.
        close = [first - second < margin for _, (first, second, *_) in other.top]
        sure = close.index(True) if True in close else len(close)
        assert one.token_ids[:sure] == other.token_ids[:sure]
        assert one.logprobs[:sure] == pytest.approx(other.logprobs[:sure], abs=margin)
        compared, total = compared + sure, total + len(close)
    assert compared > total / 2
    if real:
        counted = ours.stats()
        assert counted["graph_replays"] > 0 and counted["graphs_failed"] == 0


def test_slots_that_nobody_wrote_are_never_read(wide: Model) -> None:
    """The whole pool is NaN beforehand: one look at it and all is NaN."""
    runner = wide.runner()
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))
    harness = serve(runner, wide.prompts(), lambda _: greedy(20, ignore_eos=True, logprobs=True))
    for outcome in harness.outcomes.values():
        assert outcome.finish == "length" and np.isfinite(outcome.logprobs).all()


@pytest.mark.whole_gpu
def test_the_pool_takes_what_is_free(wide: Model, real: bool) -> None:
    """Without a number of blocks nearly all of the memory is the cache's, and steps still run."""
    if not real:
        pytest.skip("asks how much of a GPU's memory is taken")
    runner = ModelRunner.load(
        ExecutorConfig(model=str(wide.folder), device=str(wide.device)),
        CacheConfig(block_size=BLOCK_SIZE),
        max_step_tokens=4096,
        max_running=256,
    )
    _, total = torch.cuda.mem_get_info(wide.device)
    assert 0.6 * total < runner.kv_cache.nbytes < 0.97 * total
    # The last blocks are there, too.
    row = Row(Blocks(runner.num_blocks, BLOCK_SIZE), list(range(3, 43)))
    row.table = list(range(runner.num_blocks - 3, runner.num_blocks))
    (scores,) = runner.run(make_plan([Work(row)])).scores
    assert scores is not None and np.isfinite(scores.logprobs).all()
    # The harness looks at every block after every step: it is told of few.
    harness = Harness(
        runner, block_size=BLOCK_SIZE, num_blocks=4096, max_step_tokens=4096, max_running=256
    )
    for i in range(256):
        harness.add([3 + i % 50] * 30, greedy(4, ignore_eos=True))
    harness.finish()
    assert all(o.finish == "length" for o in harness.outcomes.values())
