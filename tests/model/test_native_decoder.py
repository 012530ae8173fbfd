"""The native decoder: the same bits however the work is cut, shared and computed.

Every slot that is not part of a sequence is NaN before a test begins: reading one would show.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rootlace.kernels.native import library as native
from rootlace.kernels.native.build import NativeUnavailable
from rootlace.kernels.native.library import NativeOutOfMemory
from rootlace.kernels.native.sampling import NativeSampling
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import PooledRow, StepPlan, StepResult, TokenScores
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.checkpoint.weights import LayerWeights
from rootlace.runtime.model.decoder import native_decoder
from rootlace.runtime.model.decoder.native_decoder import NativeDecoder
from rootlace.runtime.model.decoder.rotations import Rotations
from rootlace.runtime.model.executor import runner
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import MainMemory
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import SamplingParams
from tests.model.checkpoints import SHAPE, configs, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.native import native_library, skip_without

VOCAB = SHAPE["vocab_size"]
SIZE = 4
ALL = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=20, seed=0)
MODELS = ("llama-biased", "llama-tied", "qwen2-sliding", "qwen3", "mistral-sliding")
DTYPES = ("float32", "bfloat16")

OTHERS = (
    # Between them: norms, rotations, caps and activations of every kind, branches side by side.
    ("gemma2", "bfloat16"),
    ("gemma3", "float32"),
    ("olmo3", "bfloat16"),
    ("cohere2", "float32"),
    ("gpt_neox", "bfloat16"),
    ("gpt2", "bfloat16"),
    ("falcon", "bfloat16"),
    # Experts, one of which all tokens have, and sinks.
    ("qwen2_moe", "bfloat16"),
    ("gpt_oss", "float32"),
    ("mixtral", "bfloat16"),
    # Latent attention, and experts in groups.
    ("deepseek_v2", "float32"),
    ("deepseek_v3", "bfloat16"),
    # A cache of integers.
    ("qwen3", "bfloat16", "int8"),
    ("qwen3", "float32", "int4"),
)

CASES = [
    # `make check` takes each model in one type, in turns.
    pytest.param((name, dtype), marks=pytest.mark.slow if (i + j) % 2 else ())
    for i, name in enumerate(MODELS)
    for j, dtype in enumerate(DTYPES)
] + [pytest.param(case, marks=pytest.mark.slow if i % 2 else ()) for i, case in enumerate(OTHERS)]

Load = Callable[..., ModelRunner]


@pytest.fixture(scope="module", params=CASES)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    native_library()
    name, dtype, *others = request.param
    folder = tmp_path_factory.mktemp(name)
    save(configs()[name], folder)

    def loaded(block_size: int = SIZE, **options: Any) -> ModelRunner:
        options = {"kernels": "native", "dtype": dtype, **options}
        if others:  # integers lie in whole panels
            options["kv_dtype"], block_size = others[0], -(-block_size // 16) * 16
        return load_runner(folder, block_size, **options)

    return loaded


def load_runner(folder: Path, block_size: int = SIZE, **options: Any) -> ModelRunner:
    executor = ExecutorConfig(model=str(folder), **options)
    cache = CacheConfig(block_size, 2048 // block_size)
    runner = ModelRunner.load(executor, cache, 512, 16)
    with torch.inference_mode():
        cache = runner.kv_cache
        cache.fill_(255 if cache.dtype == torch.uint8 else float("nan"))
    return runner


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, count)]


def rows_of(runner: ModelRunner, prompts: Sequence[list[int]], seed: int = 0) -> list[Row]:
    blocks = Blocks(runner.num_blocks, runner.block_size, seed)
    return [Row(blocks, list(prompt)) for prompt in prompts]


def bits(scores: TokenScores | None) -> list[Any]:
    assert scores is not None
    parts = (scores.logprobs, scores.top_logprobs, scores.top_ids)
    assert np.isfinite(scores.top_logprobs).all()
    return [part.tolist() for part in parts]


def cold(runner: ModelRunner, prompt: list[int]) -> list[Any]:
    """Return the results for a prompt that is computed alone and at once."""
    [row] = rows_of(runner, [prompt])
    result = runner.run(make_plan([Work(row, params=ALL)]))
    return bits(result.scores[0])


PROMPTS = [tokens(count, seed=count) for count in (1, 5, 16, 33, 70)]
"""Prompts of growing length, so that slots behind their tokens are still NaN."""


def all_cold(runner: ModelRunner) -> list[list[Any]]:
    return [cold(runner, prompt) for prompt in PROMPTS]


def test_chunks_and_company(load: Load) -> None:
    """Prompts in chunks of any size, among rows that do something else, end in the same bits."""
    runner = load()
    expected = all_cold(runner)
    for sizes in ((1, 1, 1, 1, 1), (7, 3, 16, 1, 30), (100, 2, 5, 33, 69)):
        rows = rows_of(runner, PROMPTS, seed=sum(sizes))
        found: dict[int, list[Any]] = {}
        while len(found) < len(rows):
            going = [i for i in range(len(rows)) if i not in found]
            work = [
                Work(rows[i], min(sizes[i], len(PROMPTS[i]) - rows[i].computed), params=ALL)
                for i in going
            ]
            result = runner.run(plan := make_plan(work))
            for sample, scores in zip(plan.samples, result.scores, strict=True):
                found[going[sample.row]] = bits(scores)
        assert [found[i] for i in range(len(rows))] == expected


def test_threads(load: Load) -> None:
    expected = all_cold(load(threads=1))
    for threads in (2, 5):
        assert all_cold(load(threads=threads)) == expected


def test_block_sizes(load: Load) -> None:
    """Panels and plain rows give the same bits."""
    expected = all_cold(load())
    for size in (1, 16, 24, 48):
        assert all_cold(load(block_size=size)) == expected


@pytest.mark.parametrize("size", [SIZE, 16])
def test_shared_blocks_copies_and_duplicates(load: Load, size: int) -> None:
    """Forks of one prefix: whole blocks shared, a partial one copied, or written in this step."""
    runner, alone = load(block_size=size), load(block_size=size)
    size = runner.block_size
    prefix = tokens(8 * size + 3, seed=7)
    tails = [tokens(count, seed=20 + count) for count in (1, 2, 6, 11)]
    expected = [cold(alone, prefix + tail) for tail in tails]

    blocks = Blocks(runner.num_blocks, size, seed=1)
    whole, rest = divmod(len(prefix), size)

    def fork(owner: Row, tail: list[int]) -> Row:
        row = Row(blocks, prefix + tail, computed=len(prefix), table=owner.table[:whole])
        row.reserve(len(row.token_ids))
        return row

    # The prefix is there already: its last block is copied.
    first = Row(blocks, list(prefix))
    runner.run(make_plan([Work(first)]))
    forks = [fork(first, tail) for tail in tails]
    copies = [(first.table[whole], row.table[whole], rest) for row in forks]
    result = runner.run(make_plan([Work(row, params=ALL) for row in forks], copies))
    assert [bits(scores) for scores in result.scores] == expected

    # It is computed in the same step: its last block's rows are written to all of them.
    first = Row(blocks, prefix + tails[0])
    first.reserve(len(first.token_ids))
    forks = [fork(first, tail) for tail in tails[1:]]
    duplicates = [
        (position, row.slot(position))
        for row in forks
        for position in range(whole * size, len(prefix))
    ]
    work = [Work(row, params=ALL) for row in (first, *forks)]
    result = runner.run(make_plan(work, duplicates=duplicates))
    assert [bits(scores) for scores in result.scores] == expected

    # They go on side by side: what they share is read once.
    lines = [first, *forks]
    for step in range(3):
        for row in lines:
            row.token_ids += tokens(1, seed=step)
        result = runner.run(make_plan([Work(row, params=ALL) for row in lines]))
        for row, scores in zip(lines, result.scores, strict=True):
            assert bits(scores) == cold(alone, row.token_ids)


def test_runs_that_are_read_once(load: Load, tmp_path: Path) -> None:
    """Long enough for the forward pass to take the rows below a prefix together."""
    runner = load()
    prefix = tokens(192, seed=3)
    tails = [tokens(count, seed=40 + count) for count in (1, 1, 3, 1, 9, 1)]
    blocks = Blocks(runner.num_blocks, runner.block_size, seed=2)
    first = Row(blocks, list(prefix))
    runner.run(make_plan([Work(first)]))
    forks = [Row(blocks, prefix + tail, len(prefix), list(first.table)) for tail in tails]
    result = runner.run(make_plan([Work(row, params=ALL) for row in forks]))
    for row, scores in zip(forks, result.scores, strict=True):
        assert bits(scores) == cold(runner, row.token_ids)


def test_scored_tokens_are_those_of_prefixes(load: Load) -> None:
    """Hidden states wanted of few and of all tokens."""
    runner = load()
    prompt = tokens(40, seed=9)
    for first in (1, 38):
        rows = rows_of(runner, [prompt, PROMPTS[3]])
        work = [Work(rows[0], score_from=first, score_top=3), Work(rows[1], params=ALL)]
        result = runner.run(make_plan(work))
        [scores] = result.prompt_scores
        for i in range(len(scores.logprobs)):
            target, end = prompt[first + i], first + i
            [row] = rows_of(runner, [prompt[:end]])
            alone = runner.run(make_plan([Work(row, params=ALL)])).scores[0]
            assert alone is not None
            if target in alone.top_ids[0]:
                place = alone.top_ids[0].tolist().index(target)
                assert alone.top_logprobs[0, place] == scores.logprobs[i]
            assert alone.top_ids[0, :3].tolist() == scores.top_ids[i].tolist()
            assert alone.top_logprobs[0, :3].tolist() == scores.top_logprobs[i].tolist()
        assert bits(result.scores[1]) == cold(runner, PROMPTS[3])


def test_tokens_that_are_wanted_several_times(load: Load) -> None:
    """The last layer then has more rows than the step has tokens."""
    runner = load()
    prompt = tokens(40, seed=11)
    everything = PooledRow(0, len(prompt))

    def plan(times: int, **work: Any) -> StepPlan:
        [row] = rows_of(runner, [prompt])
        return replace(make_plan([Work(row, **work)]), pooled=[everything] * times)

    [expected] = runner.run(plan(1, params=None)).pooled
    result = runner.run(plan(9, params=ALL, score_from=1))
    for found in result.pooled:
        assert (found == expected).all()
    assert bits(result.scores[0]) == cold(runner, prompt)


def test_rotations_of_each_step(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for all positions would be too large here."""
    expected = all_cold(load())
    monkeypatch.setattr(native_decoder, "TABLE_BYTES", 0)
    assert all_cold(load()) == expected


def test_rotations_are_computed_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for hardly more than its own positions; what failed is computed again."""
    rotations = Rotations(9000, np.array([1.0, 0.1], np.float32))
    tables, whole = rotations.tables(1 << 20), rotations.of(np.arange(9000))
    assert tables is not None
    asked: list[int] = []
    of, room = rotations.of, [True]

    def counted(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not room[0]:
            raise MemoryError
        asked.append(len(positions))
        return of(positions)

    monkeypatch.setattr(rotations, "of", counted)
    room[0] = False
    with pytest.raises(MemoryError):
        rotations.reach(5)
    room[0] = True
    for position in (5, 3000, 3001, 3002, 8999):
        if position >= rotations.filled:
            rotations.reach(position)
        for table, expected in zip(tables, whole, strict=True):
            assert (table[: position + 1] == expected[: position + 1]).all()
    assert asked == [1024, 1977, 1024, 4975]


@pytest.mark.parametrize("size", [SIZE, 16])
def test_greedy_tokens_are_the_reference_s(load: Load, size: int) -> None:
    if load().dtype != torch.float32:
        pytest.skip("bfloat16 rounds differently there")
    if load().kv_cache.dtype == torch.uint8:
        pytest.skip("a last place decides now and then which integer is stored")
    found: list[list[int]] = []
    for kernels in ("native", "reference"):
        runner = load(kernels=kernels, block_size=size)
        rows = rows_of(runner, PROMPTS)
        for _ in range(12):
            result: StepResult = runner.run(make_plan([Work(row, params=ALL) for row in rows]))
            for row, token in zip(rows, result.token_ids, strict=True):
                row.token_ids.append(int(token))
        found += [[token for row in rows for token in row.token_ids]]
    assert found[0] == found[1]


# ------------------------------------------------------------ which kernels run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(configs()["llama"], folder)
    return folder


def test_without_a_compiler(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(report: object) -> None:
        raise NativeUnavailable("no C++ compiler was found (g++)")

    monkeypatch.setattr(native, "load", unavailable)
    with caplog.at_level(logging.WARNING):
        assert load_runner(folder, kernels="auto").kernels == "reference"
    assert "no C++ compiler was found" in caplog.text
    with pytest.raises(InvalidRequest, match=r"kernels 'native': no C\+\+ compiler"):
        load_runner(folder, kernels="native")


def test_what_is_asked_for(folder: Path) -> None:
    native_library()
    assert load_runner(folder).kernels == "native"
    assert load_runner(folder, kernels="reference").kernels == "reference"
    assert load_runner(folder, kv_dtype="fp8_e4m3").kernels == "reference"
    with pytest.raises(InvalidRequest, match="float8"):
        load_runner(folder, kernels="native", kv_dtype="fp8_e4m3")


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("blocks", [1 << 40, 1 << 60])
def test_a_pool_that_memory_has_no_room_for(
    folder: Path, kernels: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system had reported more memory than it gives."""
    skip_without(kernels)
    monkeypatch.setattr(runner, "main_memory", lambda: MainMemory(1 << 90, 1 << 90))
    executor = ExecutorConfig(model=str(folder), kernels=kernels)
    with pytest.raises(InvalidRequest, match=rf"no room for a KV cache of {blocks} blocks"):
        ModelRunner.load(executor, CacheConfig(16, blocks), 64, 4)


def test_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = native_library()

    def load(report: Callable[[str], None]) -> Any:
        report("compiling native kernels")
        return found

    monkeypatch.setattr(native, "load", load)
    told: list[tuple[str, float]] = []
    executor = ExecutorConfig(model=str(folder))
    ModelRunner.load(executor, CacheConfig(4, 16), 64, 4, lambda *what: told.append(what))
    assert told[0] == ("compiling native kernels", 0.0)
    assert told[-1] == ("layer 3 of 3", 1.0)


def test_plans_that_name_what_there_is_not(folder: Path) -> None:
    native_library()
    runner = load_runner(folder, kernels="native")
    kinds: list[Literal["token_ids", "positions", "slots"]] = ["token_ids", "positions", "slots"]
    for kind in kinds:
        for wrong in (-1, 1 << 20):
            plan = make_plan([Work(row) for row in rows_of(runner, PROMPTS[:2])])
            getattr(plan, kind)[1] = wrong
            with pytest.raises(ValueError, match=r"is not in|beyond"):
                runner.run(plan)
    blocks = runner.num_blocks
    for copy in ((blocks, 0, 1), (0, blocks, 1), (0, 1, SIZE + 1), (-1, 0, 1), (0, 1, -1)):
        plan = make_plan([Work(row) for row in rows_of(runner, PROMPTS[:2])])
        plan = replace(plan, copies=np.array([copy], np.int32))
        with pytest.raises(ValueError, match="to be copied is not in"):
            runner.run(plan)
    plan = make_plan([Work(row) for row in rows_of(runner, PROMPTS[:1])])
    for last in ((blocks - 1, blocks - 2, SIZE), (blocks - 2, blocks - 1, SIZE)):
        runner.run(replace(plan, copies=np.array([last], np.int32)))
    assert cold(runner, PROMPTS[1])  # it goes on


def test_a_step_that_gets_no_memory_fails_alone(folder: Path) -> None:
    """The C++ allocation fails, whatever the system grants: it asks for more than can be addressed.
    The process goes on, and so do the team and what it keeps between steps."""
    native_library()
    runner = load_runner(folder, kernels="native")
    expected = cold(runner, PROMPTS[3])
    steps = runner._steps
    assert isinstance(steps, PlainSteps) and isinstance(steps._forward, NativeDecoder)
    assert isinstance(steps._score.__self__, NativeSampling)
    mixture = steps._forward._model.mixture  # experts that nobody looks at
    mixture.count, mixture.chosen, mixture.inner = 1, 1 << 20, 1 << 30
    [row] = rows_of(runner, [PROMPTS[3]])
    launched = runner.launch(make_plan([Work(row, params=ALL)]))
    with pytest.raises(NativeOutOfMemory, match="no memory"):
        runner.collect(launched)
    mixture.count = mixture.chosen = mixture.inner = 0
    assert cold(runner, PROMPTS[3]) == expected


class Watched(Sequence[LayerWeights]):
    """Layers that are read on request, with a count of the layers in memory."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = layers
        self._seen: list[weakref.ref[LayerWeights]] = []
        self.alive: list[int] = []

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        layer = self._layers[index]
        self.alive.append(sum(one() is not None for one in self._seen))
        self._seen.append(weakref.ref(layer))
        return layer


def test_layers_are_packed_one_by_one(folder: Path) -> None:
    """At most one layer is in memory beside the layer that is read."""
    native_library()
    watched: list[Watched] = []

    def weights_of(*given: Any) -> Any:
        weights = load_weights(*given)
        watched.append(Watched(weights.layers))
        return replace(weights, layers=watched[0])

    executor = ExecutorConfig(model=str(folder), kernels="native")
    ModelRunner.load(executor, CacheConfig(4, 16), 64, 4, weights_of=weights_of)
    assert len(watched[0].alive) >= 3 and max(watched[0].alive) <= 1
