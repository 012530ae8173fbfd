"""Drafts of a head: they follow its definition, and change no bit of a text."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.block_store import LOAD
from rootlace.runtime.contracts.messages import EngineOutput
from rootlace.runtime.contracts.plan import DraftRow, StepPlan
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.draft_head import HeadDecoder
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.kv_pool import plan_of_rows
from rootlace.runtime.model.options import check_options
from rootlace.runtime.scheduler.drafter import MODEL as MODEL_SOURCE
from rootlace.wire.errors import UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.engine.harness import Harness, greedy
from tests.engine.test_draft_model import always, check_texts
from tests.engine.test_exactness import one_by_one
from tests.model.checkpoints import SHAPE, save
from tests.model.eagle_heads import (
    DRAFT_VOCAB,
    FLAT,
    HEAD,
    Reference,
    save_head,
    speculators,
    weights_of,
)
from tests.native import native_library

LAYERS = 7
MODEL = {**SHAPE, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HEADS: dict[str, dict[str, Any]] = {
    "flat": FLAT,
    "outputs": {**FLAT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}},
    "rotated": {**FLAT, "rope_scaling": LLAMA3, "head_dim": 32, "num_key_value_heads": 2},
    "speculators": speculators(
        norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[6, 0, 3]
    ),
    "normed": speculators(norm_output=True),
}
READ = {"outputs": (1, 5, 6), "speculators": (6, 0, 3)}
"""Layers before which states are taken, where that is not as usual."""
USUAL = (2, LAYERS // 2, LAYERS - 3)
EMBEDS = ("speculators", "rotated")
SEEDS = {"rotated": 3, "flat": 1}
IDS = np.random.default_rng(1).integers(3, SHAPE["vocab_size"], 330).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    native_library()
    folder = tmp_path_factory.mktemp("model")
    return folder, save(LlamaConfig(**MODEL), folder)  # type: ignore[return-value]


def weights(name: str) -> dict[str, torch.Tensor]:
    return weights_of(HEADS[name], embeds=name in EMBEDS, seed=SEEDS.get(name, 0))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("heads")
    return {name: save_head(made / name, config, weights(name)) for name, config in HEADS.items()}


Load = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def load(model: tuple[Path, LlamaForCausalLM], heads: dict[str, Path]) -> Load:
    def loaded(head: str = "", blocks: int | None = 512, **options: Any) -> ModelRunner:
        executor = ExecutorConfig(
            model=str(model[0]),
            draft_model=str(heads[head]) if head else "",
            kernels="native",
            threads=1,
            **{"dtype": "float32", **options},
        )
        return ModelRunner.load(executor, CacheConfig(4, blocks), 64, 16)

    return loaded


def row(ids: list[int], count: int = 4, *, begin: int = 0, **changes: Any) -> DraftRow:
    """A row in the blocks from `begin` on."""
    table = np.arange(begin, begin + -(-(len(ids) + count) // 4), dtype=np.int32)
    params = SamplingParams(temperature=0.0, seed=0, frequency_penalty=1e-6)  # needs logits
    made = DraftRow(np.array(ids, np.int32), len(ids), table, params, False, count, 512)
    return replace(made, **changes)


def states_of(model: LlamaForCausalLM, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[one][0] for one in layers], -1)


def drafted(head: HeadDecoder, *asked: DraftRow) -> tuple[list[list[int]], np.ndarray]:
    """Return drafts, and the logits that chose them [rows, count, vocabulary]."""
    forward, logits = head._steps._forward, []
    original = forward.logits

    def kept(*given: Any) -> np.ndarray:
        logits.append(original(*given).copy())
        return logits[-1]

    forward.logits = kept  # type: ignore[method-assign]
    try:
        made = head.draft(asked)
    finally:
        forward.logits = original  # type: ignore[method-assign]
    return made.drafts, np.stack(logits, 1)


def head_of(runner: ModelRunner) -> HeadDecoder:
    assert isinstance(runner.draft, HeadDecoder)
    return runner.draft


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_definition(
    load: Load, model: tuple[Path, LlamaForCausalLM], name: str
) -> None:
    """The prompt comes in chunks, and again behind a text that was drafted and checked in part."""
    config, runner = HEADS[name], load(name)
    head, embedding = head_of(runner), model[1].model.embed_tokens.weight.detach()
    reference = Reference(config, weights(name), embedding)
    layers = READ.get(name, USUAL)
    for begin, end in ((0, 101), (101, 150)):
        part = plan_of_rows([np.array(IDS[begin:end])], 4, begin=begin)
        runner.run(part)
    ids = IDS[:151]
    for count in (5, 3):
        states = states_of(model[1], ids[:-1], layers)
        expected, logits = reference.drafts(states, ids, count)
        [made], [near] = drafted(head, row(ids, count))
        np.testing.assert_allclose(near, logits.numpy(), rtol=1e-3, atol=1e-3)
        assert made == expected
        assert len(set(made)) > 1 or count < 5
        # Two drafted tokens are accepted, another one replaces the third.
        checked = plan_of_rows([np.array([ids[-1], *made])], 4, begin=len(ids) - 1)
        runner.run(checked)
        ids = [*ids, *made[:2], IDS[0]]
        assert head.missing(np.array(ids, np.int32), row(ids).table) == 3


def test_best_tokens_without_logits(load: Load) -> None:
    runner = load("flat")
    runner.run(plan_of_rows([np.array(IDS[:20])], 4))
    simple = row(IDS[:21], simple=True, params=SamplingParams(temperature=0.0, seed=0))
    made = head_of(runner).draft([simple]).drafts
    assert made == head_of(runner).draft([row(IDS[:21])]).drafts


def test_contexts_begin_behind_blocks_from_below_the_pool(
    load: Load, model: tuple[Path, LlamaForCausalLM]
) -> None:
    """These blocks have no features. The head sees only the context behind them, at its own
    positions."""
    runner, ids = load("flat"), IDS[:21]
    head = head_of(runner)
    reference = Reference(FLAT, weights("flat"), model[1].model.embed_tokens.weight.detach())
    runner.run(plan_of_rows([np.array(ids[:-1])], 4))
    head.moved(np.array([[LOAD, 0, 0, 1]], np.int32))
    asked = row(ids)
    assert head.missing(asked.token_ids, asked.table) == len(ids) - 9
    made = drafted(head, asked)[1][0, 0]
    states = states_of(model[1], ids[:-1], USUAL)[8:]
    # Rotations are relative: so are positions.
    expected = reference.drafts(states, ids[8:], 1)[1][0].numpy()
    np.testing.assert_allclose(made, expected, rtol=1e-3, atol=1e-3)
    head.moved(np.array([[LOAD, 0, 0, 4]], np.int32))
    assert head.draft([row(ids)]).drafts == [[]]
    # Copied blocks bring their features along.
    runner.run(plan_of_rows([np.array(ids[:-1])], 4))
    copies = plan_of_rows([np.zeros(0, np.int32)], 4)
    copies.copies = np.array([[one, 16 + one, 4] for one in range(5)], np.int32)
    runner.run(copies)
    assert head.draft([row(ids, begin=16)]).drafts == head.draft([row(ids)]).drafts


def test_rows_that_share_a_prefix(load: Load) -> None:
    """Attention computes the prefix once for both rows, with the same bits as for each row
    alone."""
    runner, apart = load("flat"), load("flat")
    asked = []
    for last in (5, 6):
        ids = [*IDS[:320], last, last]
        table = np.array([*range(80), 80 + last, 90 + last], np.int32)
        asked.append(row(ids, 4, compute=400, table=table))
        for one in (runner, apart):
            plan = plan_of_rows([np.array(ids[:-1])], 4)
            plan.block_tables[0, 80] = table[80]
            plan.slots[320:] = table[80] * 4
            one.run(plan)
    alone = [drafted(head_of(apart), one) for one in asked]
    head_of(runner).draft([asked[0]])  # computes the prefix
    assert [head_of(runner).missing(one.token_ids, one.table) for one in asked] == [1, 2]
    made, near = drafted(head_of(runner), *asked)
    assert made == [one[0][0] for one in alone]
    np.testing.assert_array_equal(near, np.concatenate([one[1] for one in alone]))


@pytest.fixture(scope="module")
def cold(load: Load) -> list[tuple[object, ...]]:
    return one_by_one(load())


@pytest.mark.parametrize("name", ["flat", "speculators"])
@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=3)
@given(dice=st.randoms(use_true_random=False), blocks=st.sampled_from([512, 40]))
def test_the_text_is_the_same_to_the_bit(
    load: Load,
    cold: list[tuple[object, ...]],
    name: str,
    overlap: bool,
    dice: random.Random,
    blocks: int,
) -> None:
    """Greedy and seeded, constrained, penalised, with log-probabilities; with preemption."""
    check_texts(load(name), cold, dice, overlap=overlap, blocks=blocks)


# A head that is right -----------------------------------------------------------------------------

FIRST, LAST = 20, 52
"""Tokens that follow each other in a circle."""


def circle(folder: Path, head: Path) -> None:
    """Save a model that writes the tokens of a circle, and a head for it. Embeddings are unit
    vectors; the head's layer maps each unit vector to the next one."""
    size = {"vocab_size": 60, "num_hidden_layers": 4}
    made = save(LlamaConfig(**{**SHAPE, **size}), folder)
    units = torch.eye(64)
    following = torch.arange(64)
    following[FIRST:LAST] = torch.arange(FIRST, LAST).roll(-1)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        made.model.embed_tokens.weight.copy_(units[:60])
        made.model.norm.weight.fill_(1)
        made.lm_head.weight.copy_(units[following.argsort()][:60])
    made.save_pretrained(folder)
    config = {**FLAT, "vocab_size": 60, "draft_vocab_size": LAST - FIRST}
    config["intermediate_size"] = 64
    weights = weights_of(config)
    for name in weights:
        if "norm" in name:
            weights[name] = torch.ones(64)
    weights["fc.weight"] = torch.cat((units, 0 * units, 0 * units), 1)
    weights["midlayer.self_attn.o_proj.weight"] *= 0
    # The norm makes 1 of a vector 8: silu(8 * 8) * 8 = 512.
    weights["midlayer.mlp.gate_proj.weight"] = 8 * units
    weights["midlayer.mlp.up_proj.weight"] = units
    weights["midlayer.mlp.down_proj.weight"] = ((units[following] - units) / 512).T.contiguous()
    weights["lm_head.weight"] = units[following.argsort()][FIRST:LAST]
    weights["d2t"] = torch.full((LAST - FIRST,), FIRST)
    save_head(head, config, weights)


class Counting(Harness):
    """Harness that counts the tokens in `usage` by source."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.accepted: Counter[int] = Counter()
        self.rejected = 0

    def take(self, updates: list[EngineOutput]) -> None:
        for update in updates:
            self.accepted.update(source for _, source in update.accepted)
            self.rejected += sum(update.rejected)
        super().take(updates)


def test_a_head_that_is_right_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is accepted, greedy and seeded. So tokens and features belong together: in
    batches, behind cached prefixes and after preemption."""
    native_library()
    always(monkeypatch, random.Random(1))
    circle(tmp_path / "model", tmp_path / "head")
    executor = ExecutorConfig(
        model=str(tmp_path / "model"),
        draft_model=str(tmp_path / "head"),
        kernels="native",
        dtype="float32",
        threads=1,  # type: ignore[arg-type]
    )
    runner = ModelRunner.load(executor, CacheConfig(4, 64), 64, 16)
    harness = Counting(runner, block_size=4, num_blocks=40, max_step_tokens=64)
    for turn in range(2):
        rids = {}
        for i in range(6):
            prompt = [*range(FIRST, FIRST + 9), *range(9), FIRST + i]
            params = msgspec.structs.replace(greedy(40, ignore_eos=True), temperature=0.1 * (i % 2))
            rids[harness.add(prompt, params)] = FIRST + i
        harness.finish()
        for rid, token in rids.items():
            circled = [FIRST + (token - FIRST + at) % (LAST - FIRST) for at in range(1, 41)]
            assert harness.outcomes[rid].token_ids == circled, turn
    stats = harness.scheduler.stats()
    assert stats["drafted_model_tokens"] > 100 and stats["retractions"]
    assert stats["accepted_model_tokens"] == stats["drafted_model_tokens"]
    assert harness.accepted == Counter({MODEL_SOURCE: stats["accepted_model_tokens"]})
    assert not harness.rejected


# Memory -------------------------------------------------------------------------------------------


def test_a_product_that_fails_ends_drafts_and_no_request(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = load("flat")

    def fail(states: np.ndarray) -> np.ndarray:
        raise RuntimeError("no product")

    monkeypatch.setattr(runner.draft, "_fuse", fail)
    harness = Harness(runner, block_size=4, num_blocks=60, max_step_tokens=64, overlap=True)
    number = harness.add([5, 6, 7, 8, 9], greedy(8, ignore_eos=True))
    harness.finish()
    assert len(harness.outcomes[number].token_ids) == 8 and not harness.outcomes[number].error
    assert caplog.text.count("nothing more is drafted") == 1


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_logits_that_are_no_numbers_end_drafts_and_no_request(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, heat: float
) -> None:
    always(monkeypatch, random.Random(1))
    runner = load("flat")
    assert runner.draft is not None
    forward = runner.draft._steps._forward
    run, runs = forward.run, []

    def broken(plan: StepPlan) -> np.ndarray:
        runs.append(plan)
        return np.full_like(run(plan), np.nan)

    monkeypatch.setattr(forward, "run", broken)
    harness = Harness(runner, block_size=4, num_blocks=60, max_step_tokens=64)
    for _ in range(2):
        params = SamplingParams(max_tokens=20, temperature=heat, seed=3, ignore_eos=True)
        number = harness.add([5, 6, 7, 8, 9], params)
        harness.finish()
        assert len(harness.outcomes[number].token_ids) == 20
        assert not harness.outcomes[number].error
    assert len(runs) == 1 and "logits are not numbers" in caplog.text
    assert caplog.text.count("nothing more is drafted") == 1


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantize": "int8"}])
def test_memory_is_for_model_head_and_features(load: Load, options: dict[str, Any]) -> None:
    size = 1 << 20
    alone, both = (
        load(name, blocks=None, kv_memory_bytes=size, **options).num_blocks for name in ("", "flat")
    )
    token = LAYERS * 2 * 2 * 16
    assert both == pytest.approx(alone * token / (token + 2 * 4 * 16 + 64), abs=1)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}]
)
def test_in_fewer_bits_it_is_near(load: Load, options: dict[str, Any]) -> None:
    logits = []
    for more in ({}, options):
        runner = load("flat", **more)
        runner.run(plan_of_rows([np.array(IDS[:20])], 4))
        made = drafted(head_of(runner), row(IDS[:21], 1))[1]
        logits.append(made[np.isfinite(made)])
    assert len(logits[0]) == DRAFT_VOCAB
    assert np.corrcoef(*logits)[0, 1] > 0.9


# Refusals -----------------------------------------------------------------------------------------


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "EAGLE-1": ({**FLAT, "architectures": ["LlamaForCausalLMEagle"]}, "architectures .*EAGLE-3"),
    "EAGLE-1 of its authors": (
        {**without(FLAT, "draft_vocab_size"), "architectures": ["EagleModel"]},
        "architectures .*EAGLE-3",
    ),
    "another method": (
        speculators(speculators_model_type="dflash"),
        "speculators_model_type 'dflash': only 'eagle3'",
    ),
    "another layer": (
        speculators(transformer_layer_config={**HEAD, "model_type": "qwen3"}),
        "model_type 'qwen3': expected 'llama'",
    ),
    "several layers": ({**FLAT, "num_hidden_layers": 2}, "num_hidden_layers 2: expected 1"),
    "another size": (
        {**FLAT, "hidden_size": 128, "head_dim": 16},
        "hidden_size 128: expected 64",
    ),
    "another model's size": ({**FLAT, "target_hidden_size": 96}, "target_hidden_size 96: only 64"),
    "another vocabulary": ({**FLAT, "vocab_size": 300}, "vocab_size 300: expected 199"),
    "a larger vocabulary": ({**FLAT, "draft_vocab_size": 200}, "draft_vocab_size 200: expected at"),
    "tied": ({**FLAT, "tie_word_embeddings": True}, "tie_word_embeddings True: expected False"),
    "biases": ({**FLAT, "attention_bias": True}, "attention_bias True: expected False"),
    "biases of the MLP": ({**FLAT, "mlp_bias": True}, "mlp_bias True: expected False"),
    "dynamic rotations": (
        {**FLAT, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic': expected default or linear",
    ),
    "unknown rotations": ({**FLAT, "rope_scaling": {"rope_type": "new"}}, "rope_type 'new' is not"),
    "a norm before fc": ({**FLAT, "norm_before_fc": True}, "norm_before_fc True: only False"),
    "norms before fc": (speculators(fc_norm=True), "fc_norm True: only False"),
    "no states": (
        {**FLAT, "eagle_config": {"use_aux_hidden_state": False}},
        "eagle_config.use_aux_hidden_state False: only True",
    ),
    "an unknown option": ({**FLAT, "eagle_config": {"steps": 2}}, "eagle_config.steps 2: this key"),
    "an unknown key": ({**FLAT, "parallel_drafts": 4}, "parallel_drafts 4: this key is not known"),
    "an unknown key of speculators": (speculators(block=4), "block 4: this key is not known"),
    "four layers": (
        speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
        "layer_ids .*expected 3 of the model's 7",
    ),
    "a layer that is not there": (
        {**FLAT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}},
        r"layer_ids \[2, 3, 7\]: expected 3 of",
    ),
    "two lists of layers": (
        {
            **FLAT,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        },
        "eagle_config has it, too",
    ),
    "codes": (
        {**FLAT, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantization_config 'fp8'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read(model: tuple[Path, LlamaForCausalLM], tmp_path: Path, name: str) -> None:
    config, said = REFUSED[name]
    save_head(tmp_path, config, {})
    executor = ExecutorConfig(model=str(model[0]), draft_model=str(tmp_path))
    with pytest.raises(UnsupportedModel, match=rf"draft_model {tmp_path}: EAGLE head: .*{said}"):
        check_options(ModelConfig.read(model[0]), executor, CacheConfig())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"fc.weight": torch.zeros(64, 128)},
            r"fc.weight has shape \[64, 128\], expected \[64, 192",
        ),
        (
            {"midlayer.self_attn.q_norm.weight": torch.ones(16)},
            "does not have: midlayer.self_attn.q",
        ),
        ({"lm_head.weight": None}, "weights are missing: lm_head.weight"),
        ({"d2t": None}, "weights are missing: d2t"),
        ({"d2t": torch.full((DRAFT_VOCAB,), 190)}, "d2t: it names a token that is not among"),
        ({"d2t": torch.zeros(DRAFT_VOCAB)}, "d2t has type F32, expected I32 or I64"),
    ],
)
def test_weights_that_are_not_a_heads(
    model: tuple[Path, LlamaForCausalLM],
    tmp_path: Path,
    changes: dict[str, torch.Tensor | None],
    said: str,
) -> None:
    weights = {**weights_of(FLAT), **changes}
    there = {name: weight for name, weight in weights.items() if weight is not None}
    save_head(tmp_path, FLAT, there)
    executor = ExecutorConfig(model=str(model[0]), draft_model=str(tmp_path), kernels="native")
    with pytest.raises(UnsupportedModel, match=said):
        ModelRunner.load(executor, CacheConfig(4, 64), 64, 16)


def test_weights_of_torch(model: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    """Weights in torch's files are read if allowed, as the first heads were published in these."""
    save_head(tmp_path, {**FLAT, "architectures": ["LlamaForCausalLM"]}, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights_of(FLAT), tmp_path / "pytorch_model.bin")
    executor = ExecutorConfig(
        model=str(model[0]), draft_model=str(tmp_path), kernels="native", allow_pickle=True
    )
    runner = ModelRunner.load(executor, CacheConfig(4, 64), 64, 16)
    runner.run(plan_of_rows([np.array(IDS[:20])], 4))
    assert len(head_of(runner).draft([row(IDS[:21])]).drafts[0]) == 4
    with pytest.raises(UnsupportedModel, match="neither model\\.safetensors nor"):
        ModelRunner.load(
            dataclasses.replace(executor, allow_pickle=False), CacheConfig(4, 64), 64, 16
        )


def test_a_model_that_has_too_few_layers(tmp_path: Path) -> None:
    save(LlamaConfig(**{**SHAPE, "num_hidden_layers": 2}), tmp_path / "model")
    save_head(tmp_path / "head", FLAT, {})
    executor = ExecutorConfig(model=str(tmp_path / "model"), draft_model=str(tmp_path / "head"))
    with pytest.raises(UnsupportedModel, match=r"\[2, 1, -1\]: expected 3 of the model's 2"):
        check_options(ModelConfig.read(tmp_path / "model"), executor, CacheConfig())
