"""Adapters' folders: the entries that are read, and refusals by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.lora import load_adapter
from rootlace.runtime.model.options import read_adapters
from rootlace.wire.errors import InvalidRequest, UnsupportedModel
from tests.model import lora
from tests.model.checkpoints import configs, save

MODULES = r"model\.layers\.\d\.self_attn\.[qv]_proj"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    lora.write(folder / "a", save(configs()["llama"], folder), MODULES)
    return folder


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the adapter, which may be changed."""
    for file in (folder / "a").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(folder: Path, adapter: Path) -> Any:
    (config,) = read_adapters([f"a={adapter}"])
    return load_adapter(config, ModelConfig.read(folder).spec, torch.float32, CPU)


def change(adapter: Path, **keys: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA': it is not LORA"),
        ({"use_dora": True}, "use_dora True: this key is not known$"),  # no option passes it over
        ({"bias": "lora_only"}, "bias 'lora_only'.*none"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": "x"}, "target_parameters.*not a list of texts"),
        ({"a_new_key": {"depth": 2}}, "a_new_key"),
        ({"target_modules": "(q_proj"}, "target_modules '.q_proj': .*not a pattern"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "does not have .*o_proj.lora_A"),
        ({"target_modules": ["q_proj"]}, r"v_proj\.lora_A\.weight, of no product"),
        ({"target_modules": ["fc1"]}, "of no product of a layer that target_modules names"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "it changes lm_head"),
        ({"layers_to_transform": [0], "target_modules": ["q_proj", "v_proj"]}, r"layers\.1\."),
        ({"r": 3}, r"lora_A.weight is \[4, 64\] of torch.float32, expected \[3, 64\]"),
        ({"rank_pattern": {"v_proj": 5}}, r"v_proj.lora_A.weight is \[4, 64\]"),
    ],
)
def test_what_is_refused(folder, copied, keys, why) -> None:
    change(copied, **keys)
    with pytest.raises(UnsupportedModel, match=why):
        load(folder, copied)


def test_a_product_that_adapters_may_not_change(tmp_path) -> None:
    module = "self_attn.kv_b_proj"
    model = save(configs()["deepseek_v2"], tmp_path)
    lora.write(tmp_path / "a", model, rf"model\.layers\.\d\.{re.escape(module)}")
    with pytest.raises(UnsupportedModel, match=rf"it changes .*{module}, which is not supported"):
        load(tmp_path, tmp_path / "a")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"peft_version": "0.19.0"}, r"before PEFT 0\.19\.1, and peft_version is 0\.19\.0"),
        ({"peft_version": None}, "peft_version is missing"),
        (
            {"rank_pattern": {"gate_up_proj": 3}},
            r"base_layer\.lora_A\.weight is .*, expected \[15, 64\]",
        ),
        ({"target_parameters": ["down_proj"]}, r"mlp\.experts\.lora_A|base_layer.*of no product"),
        ({"target_parameters": ["gate_up_proj"]}, r"experts\.lora_A\.weight is .*expected"),
    ],
)
def test_stacked_experts_that_are_refused(keys, why, tmp_path) -> None:
    model = save(configs()["mixtral"], tmp_path)
    stacks = ("gate_up_proj", "down_proj")
    parameters = [f"mlp.experts.{one}" for one in stacks]
    more = {"experts": stacks, "target_parameters": parameters}
    lora.write(tmp_path / "a", model, r".*\.q_proj", rank=2, **more)
    assert "experts.4.down" in load(tmp_path, tmp_path / "a").layers[0]
    change(tmp_path / "a", **keys)
    with pytest.raises(UnsupportedModel, match=why):
        load(tmp_path, tmp_path / "a")


def test_what_has_no_value_asks_for_nothing(folder, copied) -> None:
    file = copied / "adapter_config.json"
    keys = json.loads(file.read_text()) | {"layers_pattern": None, "exclude_modules": None}
    for empty in ("use_rslora", "bias", "rank_pattern", "init_lora_weights", "lora_alpha"):
        keys[empty] = None
    file.write_text(json.dumps(keys))
    whole, expected = load(folder, copied), load(folder, folder / "a")
    for one, other in zip(whole.layers, expected.layers, strict=True):
        assert torch.allclose(one["qkv"].b, other["qkv"].b * 8 / 6)


def test_all_linear_modules_of_some_layers(folder, tmp_path) -> None:
    model = save(configs()["llama"], tmp_path)
    lora.write(tmp_path / "a", model, r"model\.layers\.1\.(self_attn|mlp)\.\w+_proj")
    change(tmp_path / "a", target_modules="all-linear", layers_to_transform=[1])
    found = load(folder, tmp_path / "a").layers
    assert [len(layer) for layer in found] == [0, 4, *[0] * (len(found) - 2)]


def test_a_whole_name_says_its_layer_itself(folder, copied) -> None:
    """As in PEFT, only ends of names are searched in the layers to change."""
    name = "model.layers.{}.self_attn.{}_proj"
    whole = [name.format(layer, one) for layer in range(5) for one in "qv"]
    change(copied, target_modules=whole, layers_to_transform=[1])
    expected = load(folder, folder / "a")
    for one, other in zip(load(folder, copied).layers, expected.layers, strict=True):
        assert one.keys() == other.keys() and torch.equal(one["qkv"].b, other["qkv"].b)


def test_patterns_of_which_the_first_counts(folder, copied, caplog) -> None:
    """PEFT saves patterns sorted, so the first may differ from training."""
    change(copied, alpha_pattern={"v_proj": 2})
    load(folder, copied)
    assert not caplog.records
    change(copied, alpha_pattern={"layers.1.self_attn.q_proj": 3, "q_proj": 12})
    found, expected = load(folder, copied).layers, load(folder, folder / "a").layers
    (record, *_) = caplog.records
    assert "model.layers.1.self_attn.q_proj; the first counts, alpha 3" in record.getMessage()
    rows = slice(64)  # of queries
    for layer, times in ((0, 2), (1, 0.5)):
        of_q = expected[layer]["qkv"].b[rows] * times
        assert torch.allclose(found[layer]["qkv"].b[rows], of_q)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite(folder, copied, bad) -> None:
    file = copied / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("1.self_attn.v_proj.lora_B.weight"))
    tensors[name][3, 1] = bad
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match=r"1.self_attn.v_proj.lora_B.weight .*not finite"):
        load(folder, copied)


def test_weights_that_git_has_not_fetched(folder, copied) -> None:
    (copied / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UnsupportedModel, match=r"adapter_model.safetensors: a pointer of Git LFS"):
        load(folder, copied)


def test_tensors_that_do_not_fit(folder, copied) -> None:
    file = copied / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.experts.0.up_proj.lora_A.weight"
    save_file({**tensors, name: torch.zeros(4, 64)}, file)
    with pytest.raises(UnsupportedModel, match=r"mlp\.experts.0.up_proj.lora_A.weight"):
        load(folder, copied)
    file.write_bytes(b"nothing")
    with pytest.raises(UnsupportedModel, match=r"adapter 'a'.*adapter_model.safetensors"):
        load(folder, copied)
    file.unlink()
    with pytest.raises(UnsupportedModel, match=r"adapter_model.safetensors is missing"):
        load(folder, copied)


def test_what_is_given_on_the_command_line(folder, tmp_path) -> None:
    with pytest.raises(InvalidRequest, match="NAME=PATH"):
        read_adapters(["some/path"])
    with pytest.raises(InvalidRequest, match="two adapters are called 'a'"):
        read_adapters([f"a={folder / 'a'}"] * 2)
    for name in ("latest", "a:latest"):
        with pytest.raises(InvalidRequest, match="no adapter is called latest"):
            read_adapters([f"{name}={folder / 'a'}"])
    with pytest.raises(UnsupportedModel, match="not the folder of a PEFT adapter"):
        read_adapters([f"a={tmp_path}"])


def test_a_bare_model_s_adapter_is_that_of_the_whole(folder, copied) -> None:
    """PEFT uses the module names of its model, which lack "model." without a head."""
    file = copied / "adapter_model.safetensors"
    whole = load(folder, copied)
    tensors = {name.replace("model.model.", "model.", 1): t for name, t in load_file(file).items()}
    assert all(name.startswith("base_model.model.layers.") for name in tensors)
    save_file(tensors, file)
    change(copied, target_modules=["q_proj", "v_proj"])
    bare = load(folder, copied)
    for one, other in zip(whole.layers, bare.layers, strict=True):
        assert one.keys() == other.keys() == {"qkv"}
        assert torch.equal(one["qkv"].a, other["qkv"].a) and torch.equal(
            one["qkv"].b, other["qkv"].b
        )


@pytest.mark.parametrize("start", ["gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_model_as_it_was(folder, copied, start) -> None:
    """`tests/clients/test_peft.py` compares one with PEFT's own model."""
    change(copied, init_lora_weights=start)
    expected = load(folder, folder / "a")
    for one, other in zip(load(folder, copied).layers, expected.layers, strict=True):
        assert torch.equal(one["qkv"].b, other["qkv"].b)
