"""The text model of checkpoints of models that see gives transformers' log-probabilities."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from transformers import (
    Gemma3Config,
    LlavaConfig,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.runtime.model.families.table import WHOLES
from rootlace.wire.errors import UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.model.checkpoints import SHAPE, reference_logprobs, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.native import skip_without

TEXT = {**SHAPE, "num_hidden_layers": 2, "head_dim": 16}
SEES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_SEES = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
ROTATED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def configs() -> dict[str, PreTrainedConfig]:
    clip = {"model_type": "clip_vision_model", **SEES}
    return {
        "gemma3": Gemma3Config(text_config=TEXT, vision_config=SEES, mm_tokens_per_image=4),
        "llava": LlavaConfig(text_config={"model_type": "llama", **TEXT}, vision_config=clip),
        "mistral3": Mistral3Config(
            text_config={"model_type": "mistral", **TEXT},
            vision_config={"model_type": "pixtral", "head_dim": 16, **SEES},
        ),
        "qwen2_5_vl": Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": ROTATED},
            vision_config={**QWEN_SEES, "intermediate_size": 32},
        ),
        "qwen3_vl": Qwen3VLConfig(
            text_config={**TEXT, "rope_parameters": ROTATED},
            vision_config={**QWEN_SEES, "intermediate_size": 32, "deepstack_visual_indexes": [0]},
        ),
        "smolvlm": SmolVLMConfig(text_config={"model_type": "llama", **TEXT}, vision_config=SEES),
    }


@pytest.mark.parametrize("name", configs())
def test_texts(name: str, tmp_path: Path) -> None:
    skip_without("native")
    model = save(configs()[name], tmp_path, kind=AutoModelForImageTextToText)
    runner = ModelRunner.load(
        ExecutorConfig(model=str(tmp_path), kernels="native"), CacheConfig(4, 32), 64, 4
    )
    tokens = [int(one) for one in np.random.default_rng(1).integers(3, 150, 21)]
    row = Row(Blocks(32, 4), tokens)
    params = SamplingParams(temperature=0.0, logprobs=True, seed=0)
    found = runner.run(make_plan([Work(row, params=params, score_from=1)])).prompt_scores
    expected = reference_logprobs(model, tokens).numpy()
    wanted = [expected[i - 1, tokens[i]] for i in range(1, len(tokens))]
    assert np.abs(np.concatenate([one.logprobs for one in found]) - wanted).max() < 1e-4


def _changed(folder: Path, **keys: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return folder


def _read(folder: Path, **config: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.read(folder)


@pytest.mark.parametrize("kind", sorted({kind for texts in WHOLES.values() for kind in texts}))
def test_what_a_file_does_not_say_is_as_in_transformers(kind: str, tmp_path: Path) -> None:
    name = next(name for name, texts in WHOLES.items() if kind in texts)
    flat = kind in ("qwen2_vl", "qwen2_5_vl")
    text = CONFIG_MAPPING[f"{kind}_text" if flat else kind]().to_dict()
    written = _read(tmp_path, architectures=[name], text_config=text)
    own = {"model_type": kind}
    silent = _read(tmp_path, architectures=[name], **(own if flat else {"text_config": own}))
    assert silent.spec.rope is not None
    parameters = {**silent.spec.rope.parameters, "rope_type": silent.spec.rope.kind}
    spec = replace(silent.spec, rope=replace(silent.spec.rope, parameters=parameters))
    assert spec == written.spec
    assert silent.bos_token_id == written.bos_token_id
    assert silent.eos_token_ids == written.eos_token_ids


OLD_LLAVA = {
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "vocab_size": 32064,
}
OLD_SMOLVLM = {
    "text_config": {
        "model_type": "llama",
        "perceiver_config": {"model_type": "vllama3"},
        "pixel_shuffle_factor": 4,
        "qk_layer_norms": False,
        "use_resampler": False,
    },
    "use_reentrant_checkpointing": False,
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LlavaForConditionalGeneration", OLD_LLAVA),
        ("Idefics3ForConditionalGeneration", OLD_SMOLVLM),
    ],
)
def test_files_as_they_were_published(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    spec = _read(tmp_path, architectures=[name], **config).spec
    assert (spec.num_layers, spec.hidden_size) == (32, 4096)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_a_head_that_no_file_names_is_the_embedding(name: str, tmp_path: Path) -> None:
    """transformers omits the key if it is the default of the whole."""
    config = configs()[name]
    config.architectures = [f"{name.capitalize()}ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    raw.pop("tie_word_embeddings", None)
    file.write_text(json.dumps(raw))
    assert type(config).from_pretrained(tmp_path).tie_word_embeddings is True
    assert ModelConfig.read(tmp_path).spec.tied_embeddings
    file.write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    assert not ModelConfig.read(tmp_path).spec.tied_embeddings


def test_refusals(tmp_path: Path) -> None:
    configs()["gemma3"].save_pretrained(tmp_path)
    _changed(tmp_path, architectures=["Gemma3ForConditionalGeneration"])
    assert ModelConfig.read(tmp_path).spec.num_layers == TEXT["num_hidden_layers"]
    with pytest.raises(UnsupportedModel, match="looks_twice True: this key is not known"):
        ModelConfig.read(_changed(tmp_path, looks_twice=True))
    with pytest.raises(UnsupportedModel, match=r"text_config\.model_type 'gemma4' of Gemma3For"):
        ModelConfig.read(_changed(tmp_path, looks_twice=None, text_config={"model_type": "gemma4"}))
