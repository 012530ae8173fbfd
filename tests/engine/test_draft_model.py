"""Draft models: they change no bit with any accuracy, and their KV equals that of a run alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import LlamaConfig

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.block_store import LOAD
from rootlace.runtime.contracts.plan import DraftRow, Launched, ModelDrafts, StepPlan
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.draft_model import DraftDecoder
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import plan_of_rows
from rootlace.runtime.model.options import check_options
from rootlace.runtime.scheduler.draft_model import ModelSource
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.engine.harness import Harness, greedy
from tests.engine.test_exactness import PROMPTS, add_all, found, one_by_one
from tests.model.checkpoints import SHAPE, configs, save
from tests.native import native_library
from tests.scheduler.matchers import Digits

TOKENIZER = '{"model": {"vocab": {"a": 0, "b": 1}}}'
PARAMS = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, another one of other sizes, and ones with a larger and a smaller vocabulary."""
    native_library()
    others: dict[str, Any] = {
        "model": {},
        "small": {"num_hidden_layers": 1, "num_key_value_heads": 4, "max_position_embeddings": 72},
        "padded": {"vocab_size": 250, "num_hidden_layers": 1},
        "narrow": {"vocab_size": 100, "num_hidden_layers": 1},
    }
    found = {}
    for name, changes in others.items():
        found[name] = tmp_path_factory.mktemp(name)
        config = LlamaConfig(**{**SHAPE, **changes}) if changes else configs()["qwen3"]
        save(config, found[name], seed=len(changes))
        (found[name] / "tokenizer.json").write_text(TOKENIZER)
    return found


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[..., ModelRunner]:
    def loaded(draft: str = "", blocks: int | None = 512, **options: Any) -> ModelRunner:
        return ModelRunner.load(
            ExecutorConfig(
                model=str(folders["model"]),
                draft_model=str(folders[draft]) if draft else "",
                kernels="native",
                threads=2,
                **{"dtype": "float32", **options},
            ),
            CacheConfig(4, blocks),
            64,
            16,
        )

    return loaded


@pytest.fixture(scope="module")
def cold(load: Callable[..., ModelRunner]) -> list[tuple[object, ...]]:
    return one_by_one(load())


def always(monkeypatch: pytest.MonkeyPatch, dice: random.Random) -> None:
    """Have every row drafted for, whatever that costs."""
    monkeypatch.setattr(ModelSource, "worth", lambda *_: (dice.randrange(1, 7), 1e9))


def check_texts(
    runner: ModelRunner,
    cold: list[tuple[object, ...]],
    dice: random.Random,
    *,
    overlap: bool,
    blocks: int,
) -> None:
    """Texts with drafts at any moment are the `cold` ones."""
    with pytest.MonkeyPatch.context() as patch:
        always(patch, dice)
        harness = Harness(
            *(runner,),
            block_size=4,
            num_blocks=blocks,
            max_step_tokens=64,
            overlap=overlap,
            spot_seconds=1e9,
            speculation_tokens=dice.choice([0, 4096]),
        )
        for _ in range(2):
            rids = add_all(harness)
            harness.finish()
            assert found(harness, rids) == cold
    source = harness.scheduler._drafting._model
    assert source is not None and source._model is runner.draft  # which did not fail
    stats = harness.scheduler.stats()
    assert overlap or stats["drafted_model_tokens"] > 0
    harness.scheduler.cache.flush()
    assert harness.scheduler.stats()["blocks_used"] == 0


@pytest.mark.parametrize("draft", ["model", "small", "padded", "narrow"])
@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=4)
@given(dice=st.randoms(use_true_random=False), blocks=st.sampled_from([512, 40]))
def test_the_text_is_the_same_to_the_bit(
    load: Callable[..., ModelRunner],
    cold: list[tuple[object, ...]],
    draft: str,
    overlap: bool,
    dice: random.Random,
    blocks: int,
) -> None:
    """Greedy and seeded, constrained, penalised, with log-probabilities; with preemption."""
    check_texts(load(draft), cold, dice, overlap=overlap, blocks=blocks)


def test_a_draft_of_the_model_itself_is_always_right(
    load: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, penalised, behind cached and forked prefixes, after preemption: so no
    stale key or value of the draft model is read."""
    always(monkeypatch, random.Random(1))
    harness = Harness(load("model"), block_size=4, num_blocks=48, max_step_tokens=64)
    for turn in range(3):
        for i, prompt in enumerate(PROMPTS):
            params = SamplingParams(
                max_tokens=30,
                temperature=0.9 * (i % 2),
                seed=turn * 10 + i,
                frequency_penalty=0.3 * (i % 3),
                logprobs=i == 3,
                ignore_eos=True,
            )
            harness.add(prompt, params)
        harness.finish()
    stats = harness.scheduler.stats()
    assert stats["retractions"] and stats["evicted_blocks"] and stats["copies"]
    assert stats["drafted_model_tokens"] > 100
    assert stats["accepted_model_tokens"] == stats["drafted_model_tokens"]


def row(ids: list[int], blocks: list[int], count: int = 4, compute: int = 64) -> DraftRow:
    table = np.array(blocks, np.int32)
    return DraftRow(np.array(ids, np.int32), len(ids), table, PARAMS, True, count, compute)


def test_what_it_lacks_of_a_sequence(load: Callable[..., ModelRunner]) -> None:
    """A step of the model counts for the slots it writes; drafts and other slots do not."""
    runner = load("small", blocks=16)
    model, ids = runner.draft, list(range(3, 13))
    assert model is not None
    asked = row(ids, [5, 2, 9, 1])
    assert model.missing(asked.token_ids, asked.table) == 10
    first = model.draft([asked])
    assert (first.computed, first.steps, len(first.drafts[0])) == (10, 3, 4)
    longer = row(ids + first.drafts[0], [5, 2, 9, 1], count=2)
    assert model.missing(longer.token_ids, longer.table) == 1
    verified = plan_of_rows([longer.token_ids[9:]], 4, begin=9)
    verified.slots = np.array([9 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 4, 5])
    model.launched(verified)
    assert model.missing(longer.token_ids, longer.table) == 1
    model.launched(verified)  # of another sequence, perhaps
    assert model.missing(longer.token_ids, longer.table) == 5
    model.draft([longer])
    other = longer.token_ids.copy()
    other[12] = 3
    assert model.missing(other, longer.table) == 2
    model.moved(np.array([[LOAD, 0, 0, 2]], np.int32))
    assert model.missing(longer.token_ids, longer.table) == 10
    model.draft([longer])
    copied = plan_of_rows([np.zeros(0, np.int32)], 4)
    copied.copies = np.array([[0, 9, 3]], np.int32)
    model.launched(copied)
    assert model.missing(longer.token_ids, longer.table) == 6


def test_a_long_prompt_is_computed_in_parts_and_once(load: Callable[..., ModelRunner]) -> None:
    model, ids = load("small", blocks=16).draft, list(range(3, 23))
    assert model is not None
    whole = model.draft([row(ids, list(range(6)))]).drafts
    for at in range(3):
        found = model.draft([row(ids, list(range(6, 12)), compute=8)])
        assert found.computed == (8, 8, 4)[at] and found.drafts == (whole if at == 2 else [[]])
    # Two that share blocks: one computes them.
    shared = [row([*ids[:16], at], [12, 13, 14, 15, at], count=1) for at in (0, 2)]
    found = model.draft(shared)
    assert found.computed == 17 and list(map(len, found.drafts)) == [1, 0]
    assert model.draft(shared).computed == 2


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}])
def test_memory_is_for_both(
    load: Callable[..., ModelRunner], changes: dict[str, Any], folders: dict[str, Path]
) -> None:
    """The memory holds equally many blocks of both models."""
    size = 1 << 20
    counts = [
        load(draft, blocks=None, kv_memory_bytes=size, **changes).num_blocks
        for draft in ("", "model", "padded")
    ]
    assert counts[1] == pytest.approx(counts[0] / 2, abs=1)
    assert counts[1] < counts[2] < counts[0]


class TimedModel:
    """Draft model on a clock, whose steps take `seconds`."""

    def __init__(self, model: DraftDecoder, seconds: float) -> None:
        self.model = model
        self.step_seconds = seconds
        self.context_length = model.context_length
        self.missing = model.missing
        self.now = 0.0
        self.fails = False
        self.failures = self.steps = 0

    def draft(self, rows: Sequence[DraftRow]) -> ModelDrafts:
        if self.fails:
            self.failures += 1
            raise RuntimeError("damaged")
        made = self.model.draft(rows)
        first = self.step_seconds * max(1, made.computed / 10)
        further = made.steps * self.step_seconds
        self.now += first + further
        self.steps += 1 + made.steps
        return replace(made, seconds=first, step_seconds=further)


class TimedRunner:
    """A runner on the same clock: 10 ms a step, and 1 ms for each token beyond a row's first."""

    def __init__(self, runner: ModelRunner, model: TimedModel) -> None:
        self.runner, self.draft = runner, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plan: StepPlan) -> Launched:
        self.draft.now += 10e-3 + 1e-3 * (plan.num_tokens - plan.num_rows)
        return self.runner.launch(plan)


def played(
    runner: ModelRunner, seconds: float, rows: int, drafts: bool
) -> tuple[float, list[list[int]], int]:
    """Return the time of texts with a draft model of `seconds` a step, or without; the texts; and
    its draft tokens."""
    assert runner.draft is not None
    model = TimedModel(runner.draft, seconds)
    harness = Harness(
        TimedRunner(runner, model),  # type: ignore[arg-type]
        block_size=4,
        clock=lambda: model.now,
        drafts=drafts,
    )
    for turn in range(4):
        for row in range(rows):
            harness.add([*PROMPTS[0], turn, row], greedy(150, ignore_eos=True))
        harness.finish()
    texts = [one.token_ids for one in harness.outcomes.values()]
    return model.now, texts, int(harness.scheduler.stats()["drafted_model_tokens"])


@pytest.mark.parametrize("rows", [1, 4])
def test_it_is_never_slower(load: Callable[..., ModelRunner], rows: int) -> None:
    """A draft model that is right and fast saves; one as slow as the model, or wrong, costs next to
    nothing, its first drafts included."""
    right, small = load("model"), load("small")
    plain, texts, _ = played(right, 5e-4, rows, drafts=False)
    took, found, drafted = played(right, 5e-4, rows, drafts=True)
    assert found == texts
    assert took / plain < 0.6 and drafted > 500
    for runner, seconds in ((right, 1e-2), (small, 5e-4), (small, 1e-4)):
        took, found, drafted = played(runner, seconds, rows, drafts=True)
        assert found == texts
        assert took / plain < 1.02, (seconds, drafted)


class Few(Digits):
    """Allows ten tokens of all."""

    def rollback(self, count: int) -> None:
        del self.seen[len(self.seen) - count :]


def test_what_a_constraint_refuses_counts_as_wrong(load: Callable[..., ModelRunner]) -> None:
    """Hardly any token is allowed that the draft model writes, which knows of no constraint."""
    runner = load("model")
    assert runner.draft is not None
    model = TimedModel(runner.draft, 1e-4)
    harness = Harness(
        TimedRunner(runner, model),  # type: ignore[arg-type]
        block_size=4,
        clock=lambda: model.now,
        spot_seconds=1e9,
    )
    for _ in range(3):
        params = greedy(100, ignore_eos=True)
        harness.add(PROMPTS[0], params, matcher=Few(100))
        harness.finish()
    assert model.steps < 60


def test_one_that_fails_is_not_asked_again(load: Callable[..., ModelRunner]) -> None:
    runner = load("model")
    assert runner.draft is not None
    model = TimedModel(runner.draft, 1e-4)
    model.fails = True
    harness = Harness(
        TimedRunner(runner, model),  # type: ignore[arg-type]
        block_size=4,
        clock=lambda: model.now,
    )
    for _ in range(2):
        rid = harness.add(PROMPTS[0], greedy(50, ignore_eos=True))
        harness.finish()
        assert len(harness.outcomes[rid].token_ids) == 50
    assert model.failures == 1


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adapters": ("a=b",)}, "not served with adapters"),
        ({"tensor_parallel": 2}, "not served with tensor_parallel"),
        ({"device": "cuda"}, "served on a CPU only"),
        ({"kernels": "reference"}, "served with native kernels only"),
        ({"kv_dtype": "fp8_e4m3"}, "served with native kernels only"),
    ],
)
def test_what_it_does_not_go_with(
    folders: dict[str, Path], options: dict[str, Any], said: str
) -> None:
    given: dict[str, Any] = {"kernels": "auto", **options}
    executor = ExecutorConfig(
        model=str(folders["model"]), draft_model=str(folders["small"]), **given
    )
    with pytest.raises(InvalidRequest, match=f"draft_model .*: {said}"):
        if options.keys() & {"kv_dtype"}:
            ModelRunner.load(executor, CacheConfig(), 64, 4)
        check_options(ModelConfig.read(folders["model"]), executor, CacheConfig())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "it scores labels"),
        ({"hidden_act": "sine"}, "hidden_act"),
    ],
)
def test_what_is_no_draft_model(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    config = json.loads((folders["small"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    executor = ExecutorConfig(model=str(folders["model"]), draft_model=str(tmp_path))
    with pytest.raises((InvalidRequest, UnsupportedModel), match=said):
        check_options(ModelConfig.read(folders["model"]), executor, CacheConfig())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model": {"vocab": {"a": 0, "c": 1}}}', "token 1 is 'c' there, 'b' in "),
        ('{"model": {"vocab": {"a": 0, "c": 2}}}', "token 1 is None there, 'b' in "),
        ('{"model": {"vocab": [["b", 0.5], ["a", 1]]}}', "token 0 is 'b' there, 'a' in "),
        ('{"model": {"vocab": {}}, "added_tokens": [{"id": 0, "content": "x"}]}', "token 0"),
        ('{"model": {"vocab": {"a": 0, "b": 1, "pad": 2}}}', ""),
        ('{"model": {"vocab": [["a", 0]]}, "added_tokens": [{"id": 1, "content": "b"}]}', ""),
    ],
)
def test_another_tokenizer(
    load: Callable[..., ModelRunner], folders: dict[str, Path], text: str, said: str
) -> None:
    file = folders["padded"] / "tokenizer.json"
    try:
        file.write_text(text)
        if not said:
            assert load("padded", blocks=8).draft is not None
            return
        with pytest.raises(InvalidRequest, match=f"draft_model .*: it has another .*{said}"):
            load("padded", blocks=8)
    finally:
        file.write_text(TOKENIZER)
