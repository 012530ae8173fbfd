"""Models that transformers' own modules run, with our cache and attention.

Every slot that is not part of a sequence is NaN before a test begins: reading one would show.
"""

import json
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import TokenScores
from rootlace.runtime.doctor.report import examine
from rootlace.runtime.model.checkpoint.config import ModelConfig, check_config
from rootlace.runtime.model.checkpoint.source import model_source
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.model.checkpoints import SHAPE, reference_logprobs, save
from tests.model.plans import Blocks, Row, Work, make_plan

TOLERANCE = 1e-4
SCORED = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=20, seed=0)
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

SMALL_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}

MODELS: dict[str, dict[str, Any]] = {
    "helium": {"head_dim": 16},
    # Its layers hand no keywords on to attention.
    "nemotron": {"head_dim": 16},
    # Two attentions in each layer.
    "diffllama": {},
    # Sinks and windows; logits are scaled.
    "granite_swa": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "logits_scaling": 3.0,
    },
    # Caps of scores and of logits.
    "vaultgemma": {"head_dim": 16, "sliding_window": 5},
    # Keys and values of unlike sizes.
    "youtu": LATENT,
    # A mixture of experts with one that all tokens have.
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 32},
    # Of transformers 5.20 and later.
    "apertus1p5_text": {},
    "beam": {},
    "flint": {"num_experts": 8, **SMALL_EXPERTS},
    "kolibri1": {"num_local_experts": 8, **SMALL_EXPERTS},
    # Its modules are GLM-4 MoE's.
    "sarvam_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    },
}
"""Changes of `SHAPE` by model type."""


def known(kinds: Iterable[str]) -> list[Any]:
    """Return the model types, with those that transformers lacks marked to skip."""
    lacking = [kind for kind in kinds if kind not in CONFIG_MAPPING]
    why = f"transformers {transformers.__version__} has it not"
    skip = pytest.mark.skip(reason=why)
    return [pytest.param(one, marks=[skip] if one in lacking else []) for one in sorted(kinds)]


def tiny(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **{**SHAPE, "num_hidden_layers": 3, **changes})


def runner_of(folder: Path, **options: Any) -> ModelRunner:
    executor = ExecutorConfig(model=str(folder), **options)
    runner = ModelRunner.load(executor, CacheConfig(4, 64), max_step_tokens=512, max_running=16)
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))
    return runner


def tokens(count: int, seed: int = 0) -> list[int]:
    found = np.random.default_rng(seed).integers(3, SHAPE["vocab_size"], count)
    return [int(token) for token in found]


def check(theirs: PreTrainedModel, row: Row, scores: TokenScores | None, token: int) -> None:
    """`token` is what was sampled after the row's, with these scores."""
    assert scores is not None
    expected = reference_logprobs(theirs, row.token_ids)[-1].numpy()
    found = scores.top_logprobs[0]
    assert np.abs(found - expected[scores.top_ids[0]]).max() < TOLERANCE
    assert np.abs(found - np.sort(expected)[::-1][: len(found)]).max() < TOLERANCE
    assert expected[token] > expected.max() - TOLERANCE


@pytest.mark.parametrize("kind", known(MODELS))
def test_log_probabilities_are_transformers_however_work_is_cut(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = save(tiny(kind, **MODELS[kind]), tmp_path)
    with caplog.at_level(logging.INFO):
        runner = runner_of(tmp_path)
    assert sum("transformers' own modules" in line for line in caplog.messages) == 1
    blocks = Blocks(runner.num_blocks, 4)
    # Prompts in chunks, in company; a third one then continues the first one's blocks.
    rows = [Row(blocks, tokens(23)), Row(blocks, tokens(9, seed=1))]
    runner.run(make_plan([Work(rows[0], 14), Work(rows[1], 3)]))
    warm = Row(blocks, rows[0].token_ids[:12] + tokens(5, seed=2), 12, rows[0].table[:3])
    # The cold one is the same text from its beginning.
    cold = Row(blocks, list(warm.token_ids))
    rows += [warm, cold]
    for step in range(3):
        scored = {"score_from": 15, "score_top": 1} if step == 0 else {}
        work = [Work(rows[0], params=SCORED, **scored), *(Work(r, params=SCORED) for r in rows[1:])]
        result = runner.run(make_plan(work))
        if step == 0:
            expected = reference_logprobs(theirs, rows[0].token_ids).numpy()
            wanted = [expected[i - 1, rows[0].token_ids[i]] for i in range(15, 23)]
            assert np.abs(result.prompt_scores[0].logprobs - wanted).max() < TOLERANCE
        for row, scores, token in zip(rows, result.scores, result.token_ids, strict=True):
            check(theirs, row, scores, int(token))
            row.token_ids.append(int(token))
    assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("kind", known(["sarvam_moe"]))
def test_sarvam_moe_as_it_is_published(kind: str, tmp_path: Path) -> None:
    """By its own architecture, by the names that its own code has for keys, and with the defaults
    of its own configuration. Of the weights transformers writes the published names."""
    theirs = save(tiny(kind, **MODELS[kind]), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.attention.query_key_value.weight" in stored
    keys = json.loads((tmp_path / "config.json").read_text())
    for old, new in {"n_routed": "num", "n_shared": "num_shared"}.items():
        keys[f"{new}_experts"] = keys.pop(f"{old}_experts")
    keys |= {"architectures": ["SarvamMoEForCausalLM"], "use_qkv_bias": keys.pop("attention_bias")}
    keys |= {"auto_map": {"AutoConfig": "configuration_sarvam_moe.SarvamMoEConfig"}}
    keys |= {"rope_parameters": None, "rope_theta": 8e6, "rope_scaling": None}
    runner = runner_of(written(tmp_path, keys))
    row = Row(Blocks(runner.num_blocks, 4), tokens(9))
    result = runner.run(make_plan([Work(row, params=SCORED)]))
    check(theirs, row, result.scores[0], int(result.token_ids[0]))


def written(folder: Path, keys: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "do not use transformers' attention interface"),
        ({"architectures": ["BloomForCausalLM"]}, "do not use transformers' attention interface"),
        ({"architectures": ["NobodyForCausalLM"]}, "transformers: unknown"),
        (
            {"architectures": ["NobodyForCausalLM"], "auto_map": {}},
            "they need code of their own, which is not run",
        ),
        ({"architectures": ["HeliumModel"]}, "is not supported"),
        ({"architectures": ["HeliumForCausalLM"], "is_encoder_decoder": True}, "encoders"),
        (
            {"architectures": ["HeliumForCausalLM"], "quantization_config": {"bits": 4}},
            "quantised weights",
        ),
        (
            {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"]},
            "layers of conv (layer_types)",
        ),
    ],
)
def test_what_the_configuration_rules_out_is_refused_without_transformers(
    keys: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        check_config(model_source(written(tmp_path, keys)))
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_architecture_is_that_of_the_configuration(tmp_path: Path) -> None:
    keys = tiny("arcee").to_dict() | {"architectures": ["HeliumForCausalLM"]}
    with pytest.raises(UnsupportedModel, match="model_type 'arcee' is not that of HeliumForCausal"):
        ModelConfig.read(written(tmp_path, keys))


@pytest.mark.parametrize(
    ("kind", "architecture", "changes", "why"),
    [
        ("bert", "BertLMHeadModel", {}, "its attention is not causal"),
        ("doge", "DogeForCausalLM", {}, "it changes its masks"),
        (
            "llama4_text",
            "Llama4ForCausalLM",
            {"attention_chunk_size": 16},
            "its masks depend on more than positions",
        ),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", {}, "layers without attention"),
        ("gemma4_text", "Gemma4ForCausalLM", {"head_dim": 16}, "unlike numbers or sizes"),
        ("helium", "HeliumForCausalLM", {"hidden_act": "magic"}, "KeyError"),
    ],
)
def test_what_layers_ask_for_and_we_have_not_is_refused_before_weights_are_read(
    kind: str, architecture: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    keys = tiny(kind, **changes).to_dict() | {"architectures": [architecture]}
    keys.pop("layer_types", None)  # which would be judged first
    with pytest.raises(UnsupportedModel, match=f"{architecture}: .*{why}") as raised:
        ModelConfig.read(written(tmp_path, keys))
    assert "\n" not in str(raised.value)


NEWER_REFUSED = {
    "bailing_hybrid": ("BailingHybridForCausalLM", "do not use transformers' attention interface"),
    "dory": ("DoryForCausalLM", "layers of mlp"),
    "dots3_note_text": ("Dots3NoteForCausalLM", "layers of indexed_attention"),
    "hy_v4_vl": ("HYV4VLForConditionalGeneration", "is not supported"),
    "inkling2_text": ("Inkling2ForCausalLM", "do not use transformers' attention interface"),
    "inkling2_loop_text": ("Inkling2LoopForCausalLM", "do not use transformers' attention"),
    "lara_mini": ("LaraMiniForCausalLM", "do not use transformers' attention interface"),
    "lfm3": ("Lfm3ForCausalLM", "layers of conv"),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", "is not supported"),
}
"""Of transformers 5.20 and later, by model type: the architecture, and why it is refused."""


@pytest.mark.parametrize("kind", known(NEWER_REFUSED))
def test_newer_models_that_are_refused(kind: str, tmp_path: Path) -> None:
    architecture, why = NEWER_REFUSED[kind]
    keys = AutoConfig.for_model(kind).to_dict() | {"architectures": [architecture]}
    with pytest.raises(UnsupportedModel, match=f"{architecture}.*{why}"):
        ModelConfig.read(written(tmp_path, keys))


@pytest.fixture(scope="module")
def helium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("helium")
    save(tiny("helium", head_dim=16), folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_mix_tokens_themselves_are_refused(
    helium: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is little, and roundings are larger."""
    from transformers.models.helium.modeling_helium import HeliumMLP

    own = HeliumMLP.forward

    def mixing(self: Any, x: torch.Tensor) -> torch.Tensor:
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        mixed: torch.Tensor = own(self, x + 0.03 * before)
        return mixed

    monkeypatch.setattr(HeliumMLP, "forward", mixing)
    with pytest.raises(UnsupportedModel, match="mix tokens by something else than attention"):
        runner_of(helium, dtype=dtype)


def test_layers_that_have_positions_of_their_own_are_refused(
    helium: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.helium.modeling_helium import HeliumRotaryEmbedding

    own = HeliumRotaryEmbedding.forward

    def counting(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return own(self, x, position_ids=torch.arange(x.shape[1], device=x.device).unsqueeze(0))

    monkeypatch.setattr(HeliumRotaryEmbedding, "forward", counting)
    with pytest.raises(UnsupportedModel, match="mix tokens"):
        runner_of(helium, dtype="bfloat16")


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"kv_dtype": "fp8_e4m3"}])
def test_options_that_are_for_our_own_decoders(helium: Path, options: dict[str, Any]) -> None:
    (name,) = options
    examined = partial(examine, ExecutorConfig(model=str(helium), **options), lambda *_: None)
    for start in (partial(runner_of, helium, **options), examined):
        with pytest.raises(InvalidRequest, match=f"{name}.* not supported for HeliumForCausalLM"):
            start()


def test_a_cache_of_integers(helium: Path) -> None:
    """What follows from keys and values that are rounded a little is a little different."""
    found = []
    for options in ({}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}):
        runner = ModelRunner.load(
            ExecutorConfig(model=str(helium), **options), CacheConfig(4, 16), 64, 2
        )
        row = Row(Blocks(16, 4), tokens(20))
        result = runner.run(make_plan([Work(row, params=SCORED, score_from=1)]))
        found.append(result.prompt_scores[0].logprobs)
    eight, four = (np.abs(other - found[0]).mean() for other in found[1:])
    # Steps of 4 bits are 17 times as large; errors of a whole nat grow faster.
    assert 0 < eight < 0.06 and eight < four < 30 * eight


def test_weights_must_be_those_of_the_model(helium: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(helium / "model.safetensors")
    (tmp_path / "config.json").write_bytes((helium / "config.json").read_bytes())
    for change, why in (({"odd": torch.ones(3)}, "does not have: odd"), ({}, "")):
        kept = {k: v for k, v in weights.items() if change or k != "model.norm.weight"}
        save_file(kept | change, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(UnsupportedModel, match=why or "are missing: model.norm.weight"):
            runner_of(tmp_path)
