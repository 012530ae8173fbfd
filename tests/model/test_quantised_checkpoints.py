"""Quantised checkpoints: weights and log-probabilities are those that their formats mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rootlace.kernels.reference.layers import dequantise
from rootlace.kernels.weights import Dense, Quantised, Weight, parts_of
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.checkpoint.weights import ModelWeights, layer_parts, row_order
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import UnsupportedModel
from rootlace.wire.protocol import SamplingParams
from tests.model import quantised_checkpoints as writers
from tests.model.checkpoints import configs, reference, reference_logprobs, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.model.quantised_checkpoints import WEIGHTS, Write, edit, quantised
from tests.model.weight_sizes import num_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TOKENS = [5, 150, 7, 32, 9, 11, 4, 77, 3, 60, 198, 41]
ALL = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=100, seed=0)
Kernels = Literal["auto", "native", "reference"]
Format = tuple[dict[str, Any], Write]


def ints(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32} | more


def floats(bits: int, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float"} | more


CHANNEL = {"strategy": "channel", "group_size": None}
TENSOR = {"strategy": "tensor", "group_size": None}
W8A8 = {"input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"}}
PACKED, WHOLE, REAL = "pack-quantized", "int-quantized", "float-quantized"

FORMATS: dict[str, Callable[[], Format]] = {
    "ct-int4": lambda: writers.compressed(PACKED, ints(4)),
    "ct-int4-zeros": lambda: writers.compressed(PACKED, ints(4, symmetric=False)),
    "ct-int4-rows": lambda: writers.compressed(PACKED, ints(4, **CHANNEL)),
    "ct-int4-rows-zeros": lambda: writers.compressed(PACKED, ints(4, symmetric=False, **CHANNEL)),
    "ct-int8": lambda: writers.compressed(PACKED, ints(8, group_size=16)),
    "ct-int8-zeros": lambda: writers.compressed(PACKED, ints(8, symmetric=False)),
    "ct-w8a8": lambda: writers.compressed(WHOLE, ints(8, **CHANNEL), **W8A8),
    "ct-w8a8-zeros": lambda: writers.compressed(WHOLE, ints(8, symmetric=False, **CHANNEL), **W8A8),
    "ct-w8a8-tensor": lambda: writers.compressed(WHOLE, ints(8, **TENSOR), **W8A8),
    "ct-w4a8-bytes": lambda: writers.compressed(WHOLE, ints(4), **W8A8),
    "ct-w4a8-bytes-zeros": lambda: writers.compressed(WHOLE, ints(4, symmetric=False), **W8A8),
    "ct-naive": lambda: writers.compressed("naive-quantized", ints(8)),
    "ct-fp8": lambda: writers.compressed(REAL, floats(8, strategy="tensor")),
    "ct-fp8-rows": lambda: writers.compressed(REAL, floats(8, strategy="channel")),
    "ct-fp8-blocks": lambda: writers.compressed(
        REAL, floats(8, strategy="block", block_structure=[48, 40])
    ),
    "ct-mxfp8": lambda: writers.compressed(
        "mxfp8-quantized", floats(8, strategy="group", group_size=32, scale_dtype=torch.uint8)
    ),
    "ct-mxfp4": lambda: writers.compressed(
        "mxfp4-pack-quantized",
        floats(4, strategy="group", group_size=32, scale_dtype=torch.uint8),
    ),
    "ct-nvfp4": lambda: writers.compressed(
        "nvfp4-pack-quantized", floats(4, strategy="tensor_group", group_size=16)
    ),
    "gptq": lambda: writers.gptq(4, 32),
    "gptq-symmetric": lambda: writers.gptq(4, 32, symmetric=True),
    "gptq-v2": lambda: writers.gptq(4, 32, "gptq_v2"),
    "gptq-8": lambda: writers.gptq(8, 16),
    "gptq-rows": lambda: writers.gptq(4, -1),
    "gptq-ordered": lambda: writers.gptq(4, 32, order=True),
    "gptq-8-ordered": lambda: writers.gptq(8, 32, order=True),
    # 96 inputs are no whole groups of 40, nor 64.
    "gptq-odd-group": lambda: writers.gptq(4, 40),
    "gptq-odd-ordered": lambda: writers.gptq(4, 40, order=True),
    "awq": lambda: writers.awq(32),
    "fp8": lambda: writers.fp8((32, 32)),
    "fp8-odd-blocks": lambda: writers.fp8((48, 40)),
    "fp8-large-blocks": lambda: writers.fp8((128, 128)),
    "fp8-exponents": lambda: writers.fp8((32, 32), exponents=True),
    "fp8-tensor": lambda: writers.fp8(None, ".weight_scale"),
    "mxfp4": writers.mxfp4,
    "awq-symmetric": lambda: writers.awq(32, symmetric=True),
    "auto-round-gptq": lambda: writers.auto_round(
        "auto_gptq", writers.gptq(4, 32), bits=4, group_size=32
    ),
    "auto-round-gptqmodel": lambda: writers.auto_round(
        "gptqmodel", writers.gptq(8, -1, "gptq_v2"), bits=8, group_size=-1, sym=False
    ),
    "auto-round-awq": lambda: writers.auto_round(
        "auto_awq", writers.awq(32), bits=4, group_size=32, sym=False
    ),
    "auto-round-fp8": lambda: writers.auto_round(
        "fp8",
        writers.fp8((32, 32)),
        data_type="fp",
        bits=8,
        group_size=[32, 32],
        weight_block_size=[32, 32],
        fmt="e4m3",
        act_bits=8,
        act_data_type="fp",
        act_dynamic=True,
        act_group_size=32,
        act_sym=True,
        activation_scheme="dynamic",
    ),
    "auto-round-mxfp8": lambda: writers.auto_round(
        "llm_compressor", FORMATS["ct-mxfp8"](), data_type="mx_fp", bits=8, group_size=32
    ),
    "auto-round-mxfp4": lambda: writers.auto_round(
        "llm_compressor", FORMATS["ct-mxfp4"](), data_type="mx_fp", bits=4, group_size=32
    ),
    "auto-round-nvfp4": lambda: writers.auto_round(
        "llm_compressor", FORMATS["ct-nvfp4"](), data_type="nv_fp", bits=4, group_size=16
    ),
}
DENSE_TYPES = {
    "ct-int4": torch.float16,
    "ct-int4-zeros": torch.bfloat16,
    "ct-int4-rows-zeros": torch.float16,
    "ct-int8-zeros": torch.bfloat16,
    "ct-w8a8": torch.bfloat16,
    "ct-w8a8-zeros": torch.float16,
    "ct-w4a8-bytes-zeros": torch.bfloat16,
}
"""Types of the checkpoints, and of scales with them; else float32. With zero points, results are
exact for scales of 16 bits, as all checkpoints have them."""


def made(name: str, folder: Path, family: str = "qwen2", **options: Any) -> tuple[Path, Path]:
    """Make the folders of a quantised checkpoint and of the dense one of equal values."""
    settings, write = FORMATS[name]()
    dtype = DENSE_TYPES.get(name, torch.float32)
    dense = quantised(configs()[family], folder, settings, write, dtype, **options)
    return folder / "quantised", dense


def read(folder: Path) -> ModelWeights:
    return load_weights(ModelConfig.read(folder), torch.float32, CPU)


def matrix(weight: Weight) -> torch.Tensor:
    parts = parts_of(weight)
    return torch.cat([p.matrix if isinstance(p, Dense) else dequantise(p) for p in parts])


def check_weights(packed: Path, dense: Path) -> ModelWeights:
    """All parts of all layers, bit by bit."""
    spec, stored, weights = ModelConfig.read(packed).spec, load_file(dense / WEIGHTS), read(packed)
    for index, layer in enumerate(weights.layers):
        for name, part in layer_parts(spec, index).items():
            if part.columns is None:
                continue
            wanted = torch.cat([stored[one] for one in part.weights()])
            order = row_order(spec, name)
            wanted = wanted if order is None else wanted[order]
            assert torch.equal(matrix(layer.part(name)), wanted), (index, name)
    return weights


DENSE_ON_NATIVE = ("gptq-odd-group", "gptq-odd-ordered", "fp8-odd-blocks", "ct-fp8-blocks")
"""Formats whose groups of columns are too small for the native kernels."""
UNPACKED = "take the memory of dense ones"
"""Text of the log about weights that are made dense."""


def check_logprobs(
    packed: Path,
    dense: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    asked: Kernels = "auto",
    kernels: str = "native",
    unpacked: bool = False,
) -> None:
    """Compare log-probabilities. `kernels` must run if requested, and codes must be `unpacked` if
    so."""
    executor = ExecutorConfig(model=str(packed), dtype="float32", kernels=asked, device="cpu")
    caplog.clear()
    runner = ModelRunner.load(executor, CacheConfig(4, 16), 64, 4)
    assert runner.kernels == kernels
    assert (UNPACKED in caplog.text) == unpacked
    found = runner.run(make_plan([Work(Row(Blocks(16, 4), list(TOKENS)), params=ALL)])).scores[0]
    assert found is not None
    expected = reference_logprobs(reference(dense, torch.float32), TOKENS)[-1].numpy()
    assert np.abs(found.top_logprobs[0] - expected[found.top_ids[0]]).max() < 1e-4
    assert abs(found.logprobs[0] - expected.max()) < 1e-4


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_what_the_format_means(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    packed, dense = made(name, tmp_path)
    weights = check_weights(packed, dense)
    assert "all weights are dense" not in caplog.text
    for layer in weights.layers:
        for weight in layer.products():
            parts = parts_of(weight)
            assert all(isinstance(part, Quantised) for part in parts)
            # Modules of the same inputs are one matrix.
            assert len(parts) == 1
    check_logprobs(packed, dense, caplog, unpacked=name in DENSE_ON_NATIVE)


@pytest.mark.parametrize("name", ["ct-int4", "ct-fp8-blocks"])
def test_transformers_reads_the_same_files(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers reads these files on a CPU without further packages, and computes without
    rounding."""
    packed, _ = made(name, tmp_path)
    check_logprobs(packed, packed, caplog, unpacked=name in DENSE_ON_NATIVE)


FAMILIES = {
    # Heads' rows are put in another order, neighbours are rotated together.
    "glm4": ("gptq-ordered", ("_proj",)),
    # Queries, keys and values are one module, of whose heads a part is rotated.
    "phi3-partial": ("ct-int4", ("_proj",)),
    "gemma2": ("awq", ("_proj",)),
    "llama-biased": ("fp8", ("_proj",)),
    "llama-tied": ("ct-int4", ("_proj", "lm_head")),
    "mistral": ("fp8", ("_proj", "lm_head")),
    # Rows of queries, keys and values are joined by group, in one module, with biases.
    "gpt_neox": ("gptq-ordered", ("query_key_value", "dense", "_4h", "_to_h")),
    "falcon-grouped": ("ct-fp8-blocks", ("query_key_value", "dense", "_4h", "_to_h")),
    "mixtral": ("ct-int4", ("_proj", ".w1", ".w2", ".w3")),
    "deepseek_v3": ("fp8", ("_proj", "_with_mqa")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture) -> None:
    """The modules include biases, joined and tied ones, and a quantised head."""
    name, modules = FAMILIES[family]
    packed, dense = made(name, tmp_path, family, modules=modules)
    weights = check_weights(packed, dense)
    tied = isinstance(weights.head, Dense) and weights.head.matrix is weights.embedding
    assert tied == (family in ("gemma2", "llama-tied", "falcon-grouped"))
    assert (weights.head.kind == "fp8_e4m3") == (family == "mistral")
    check_logprobs(packed, dense, caplog, kernels="native", unpacked=name in DENSE_ON_NATIVE)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("name", ["gptq", "gptq-ordered", "awq", "ct-int4", "ct-nvfp4"])
def test_a_quantised_head(
    tmp_path: Path,
    name: str,
    kernels: Kernels,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whose module has no tensor ".weight". One with columns in another order becomes dense on
    native kernels, which the log says."""
    config = configs()["llama"]
    config.vocab_size = 200
    settings, write = FORMATS[name]()
    settings |= {"ignore": []} if "ignore" in settings else {}
    dense = quantised(config, tmp_path, settings, write, modules=("_proj", "lm_head"))
    packed = tmp_path / "quantised"
    head = read(packed).head
    assert isinstance(head, Quantised)
    assert torch.equal(dequantise(head), load_file(dense / WEIGHTS)["lm_head.weight"])
    unpacked = name == "gptq-ordered" and kernels == "native"
    check_logprobs(packed, dense, caplog, asked=kernels, kernels=kernels, unpacked=unpacked)
    assert ("columns of a head" in caplog.text) == unpacked


def test_experts_in_mxfp4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All experts of a layer are one tensor, multiplied as stored."""
    settings, write = FORMATS["mxfp4"]()
    for folder in (dense := tmp_path / "dense", packed := tmp_path / "packed"):
        save(configs()["gpt_oss"], folder)
    plain = load_file(dense / WEIGHTS)
    stored, expected = dict(plain), dict(plain)
    for name in plain:
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        made = [write(f"{name}.{at}", one.t()) for at, one in enumerate(plain[name])]
        expected[name] = torch.stack([matrix.t() for _, matrix in made]).contiguous()
        del stored[name]
        for ending in ("_blocks", "_scales"):
            stored[name + ending] = torch.stack([tensors[ending] for tensors, _ in made])
    save_file(expected, dense / WEIGHTS)
    save_file(stored, packed / WEIGHTS)
    edit(packed, quantization_config=settings)
    weights = read(packed)
    for layer in weights.layers:
        for expert in layer.experts:
            assert (expert.gate_up.kind, expert.down.kind) == ("e2m1", "e2m1")
    config = ModelConfig.read(packed)
    said = weight_bytes(config, torch.float32, "none", head_apart=False)
    # Scales are a byte in the file, and two in memory.
    assert said == pytest.approx(num_bytes(weights), rel=0.03)
    check_logprobs(packed, dense, caplog)


def test_transposed_modules_are_refused(tmp_path: Path) -> None:
    packed, _ = made("ct-int4", tmp_path, "gpt2", modules=("c_fc",))
    with pytest.raises(UnsupportedModel, match=r"c_fc is quantised and has a row for each input"):
        read(packed)


def test_some_modules_are_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A part of a joined product is dense; the quantised rest stays quantised."""
    packed, dense = made("ct-int4", tmp_path, modules=("q_proj", "down_proj", "up_proj"))
    weights = check_weights(packed, dense)
    kinds = [product.kind for product in weights.layers[1].products()]
    assert kinds == ["int4 and dense", "dense", "dense and int4", "int4"]
    # The native kernels pack gate and up together, of which one is dense.
    check_logprobs(packed, dense, caplog, unpacked=True)


def test_a_tied_head_that_is_quantised_is_not_tied(tmp_path: Path) -> None:
    packed, _ = made("fp8", tmp_path, "llama-biased", modules=("_proj", "lm_head"))
    wanted = read(packed)
    edit(packed, tie_word_embeddings=True)
    found = read(packed)
    assert found.head.kind == "fp8_e4m3"
    assert torch.equal(matrix(found.head), matrix(wanted.head))
    assert torch.equal(found.embedding, wanted.embedding)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    stored = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(stored)
    save_file(stored, folder / WEIGHTS)


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


O_PROJ = "model.layers.1.self_attn.o_proj"


def test_zero_biases_are_nothing(tmp_path: Path) -> None:
    """AutoGPTQ writes biases whether or not the model has any."""
    packed, dense = made("gptq", tmp_path)
    rewrite(packed, lambda stored: stored.update({f"{O_PROJ}.bias": torch.zeros(64)}))
    assert check_weights(packed, dense).layers[1].output.bias is None
    rewrite(packed, lambda stored: stored[f"{O_PROJ}.bias"].fill_(0.5))
    with pytest.raises(UnsupportedModel, match=rf"{O_PROJ}.bias is not zero"):
        read(packed).resident()


def test_zero_points_that_are_nothing(tmp_path: Path) -> None:
    """Zero points of nothing in one module do not keep it from being joined."""
    settings, shifted = writers.gptq(4, 32)
    _, plain = writers.gptq(4, 32, symmetric=True)

    def write(module: str, weight: torch.Tensor) -> Any:
        return (plain if "k_proj" in module or "layers.0" in module else shifted)(module, weight)

    dense = quantised(configs()["llama"], tmp_path, settings, write)
    weights = check_weights(tmp_path / "quantised", dense)
    for index, offsets in ((0, False), (1, True)):
        qkv = weights.layers[index].qkv
        assert isinstance(qkv, Quantised)
        assert qkv.scheme.offsets == offsets


def test_gptq_by_module(tmp_path: Path) -> None:
    """`dynamic` states other bits and groups for some modules, and which ones are not quantised."""
    four, write_four = writers.gptq(4, 32)
    _, write_eight = writers.gptq(8, 16)

    def write(module: str, weight: torch.Tensor) -> Any:
        if "down_proj" in module:
            return write_eight(module, weight)
        if "layers.1" in module:
            return {".weight": weight}, weight
        return write_four(module, weight)

    dynamic = {
        r"-:model\.layers\.1\.(?!mlp\.down)": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 16},
    }
    dense = quantised(configs()["llama"], tmp_path, four | {"dynamic": dynamic}, write)
    weights = check_weights(tmp_path / "quantised", dense)
    kinds = [[product.kind for product in layer.products()] for layer in weights.layers]
    quantised_layer = ["int4", "int4", "int4", "int8"]
    assert kinds == [quantised_layer, ["dense", "dense", "dense", "int8"], quantised_layer]


def test_awq_by_module(tmp_path: Path) -> None:
    """As GPTQModel writes it, which is what transformers writes AWQ with: its keys beside those of
    AutoAWQ, and `dynamic`."""
    settings, write_four = writers.awq(32)
    _, write_wide = writers.awq(64)

    def write(module: str, weight: torch.Tensor) -> Any:
        if "layers.1.mlp" in module:
            return {".weight": weight}, weight
        return (write_wide if "o_proj" in module else write_four)(module, weight)

    settings |= {
        "checkpoint_format": "gemm",
        "format": "gemm",
        "method": "awq",
        "pack_dtype": "int32",
        "desc_act": False,
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
        "dynamic": {r"-:.*layers\.1\.mlp.*": {}, r"+:.*\.o_proj": {"group_size": 64}},
    }
    dense = quantised(configs()["llama"], tmp_path, settings, write)
    weights = check_weights(tmp_path / "quantised", dense)
    kinds = [[product.kind for product in layer.products()] for layer in weights.layers]
    assert kinds == [["int4"] * 4, ["int4", "int4", "dense", "dense"], ["int4"] * 4]


def test_auto_round_by_module(tmp_path: Path) -> None:
    """`extra_config` states by name or pattern what differs from the whole: a name goes first, and
    16 bits are not quantised."""
    settings, write_four = FORMATS["auto-round-gptq"]()
    _, write_eight = writers.gptq(8, 32)
    _, write_wide = writers.gptq(4, -1)

    def write(module: str, weight: torch.Tensor) -> Any:
        if module == "model.layers.0.self_attn.k_proj":
            return {".weight": weight}, weight
        if module == O_PROJ:
            return write_wide(module, weight)
        return (write_eight if "k_proj" in module else write_four)(module, weight)

    extra = {
        ".*k_proj.*": {"bits": 8},
        "model.layers.0.self_attn.k_proj": {"bits": 16, "act_bits": 16, "rotation_config": None},
        O_PROJ: {"group_size": -1, "sym": False},
        "lm_head": {"bits": 16},
        "nothing": {},
    }
    dense = quantised(configs()["llama"], tmp_path, settings | {"extra_config": extra}, write)
    weights = check_weights(tmp_path / "quantised", dense)
    kinds = [[product.kind for product in layer.products()] for layer in weights.layers]
    others = ["int4", "int4", "int4"]
    assert kinds == [
        ["int4 and dense", *others],
        ["int4 and int8", *others],
        ["int4 and int8", *others],
    ]


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "ct-int4"])
def test_auto_round_writes_other_formats(tmp_path: Path, method: str) -> None:
    """AutoRound's remarks also occur in configurations of other methods."""
    packed, dense = made(method, tmp_path)
    kinds = {"gptq": {"data_type": "int"}, "awq": {"data_type": "int", "sym": False}}
    own = {"data_type": "fp", "bits": 8, "sym": True, "group_size": [32, 32], "act_bits": 8}
    said = writers.AUTO_ROUND | kinds.get(method, own) if method != "ct-int4" else {}
    said = said | {"provider": "auto-round"}
    edit(packed, quantization_config=settings_of(packed) | said)
    check_weights(packed, dense)


@pytest.mark.parametrize(("method", "order"), [("awq", "reorder"), ("fp8-tensor", "order")])
def test_quark_writes_other_formats(tmp_path: Path, method: str, order: str) -> None:
    """AMD's Quark adds its export settings to the configurations."""
    packed, dense = made(method, tmp_path)
    export = {"kv_cache_group": [], "min_kv_scale": 0.0, "weight_merge_groups": None}
    said: dict[str, Any] = {
        "export": export | {"pack_method": order, "weight_format": "real_quantized"}
    }
    if method == "awq":
        said["pack_method"] = order
    edit(packed, quantization_config=settings_of(packed) | said)
    check_weights(packed, dense)


def test_symmetric_awq_has_one_zero_point(tmp_path: Path) -> None:
    packed, _ = made("awq", tmp_path)
    edit(packed, quantization_config=settings_of(packed) | {"zero_point": False})
    with pytest.raises(UnsupportedModel, match=r"qzeros has others than 8"):
        read(packed).resident()


def test_groups_of_modules_in_formats_of_their_own(tmp_path: Path) -> None:
    """Names precede patterns, patterns precede classes, and ignored modules precede all."""
    settings, four = writers.compressed(PACKED, ints(4))
    other, eight = writers.compressed(WHOLE, ints(8, **CHANNEL), **W8A8)
    third, rows = writers.compressed(PACKED, ints(4, **CHANNEL))
    groups = {
        "classes": settings["config_groups"]["group_0"] | {"format": PACKED},
        "patterns": other["config_groups"]["group_0"]
        | {"format": WHOLE, "targets": [r"re:.*mlp\..*_proj$", r"re:.*self_attn\.o_proj$"]},
        "names": third["config_groups"]["group_0"] | {"format": PACKED, "targets": [O_PROJ]},
        "attention": {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8}},
    }
    settings |= {
        "config_groups": groups,
        "format": "mixed-precision",
        "ignore": ["lm_head", "model.layers.0.mlp.down_proj", r"re:model\.layers\.2\.self_attn.*"],
    }

    def write(module: str, weight: torch.Tensor) -> Any:
        if module == O_PROJ:
            return rows(module, weight)
        if module == "model.layers.0.mlp.down_proj" or "layers.2.self_attn" in module:
            return {".weight": weight}, weight
        return (eight if "mlp" in module or "o_proj" in module else four)(module, weight)

    dense = quantised(configs()["llama"], tmp_path, settings, write)
    weights = check_weights(tmp_path / "quantised", dense)
    kinds = [[product.kind for product in layer.products()] for layer in weights.layers]
    assert kinds == [
        ["int4", "int8", "int8", "dense"],
        ["int4", "int4", "int8", "int8"],
        ["dense", "dense", "int8", "int8"],
    ]


def test_what_is_stored_besides(tmp_path: Path) -> None:
    """Scales of activations and of a cache, zero points of symmetric weights, column groups that
    are in order, and the shapes of scales that say the same."""
    packed, dense = made("ct-int4-rows", tmp_path)
    columns = torch.zeros(64, dtype=torch.int32)

    def add(stored: dict[str, torch.Tensor]) -> None:
        stored[f"{O_PROJ}.input_scale"] = torch.ones(1)
        stored[f"{O_PROJ}.output_scale"] = torch.ones(1)
        stored["model.layers.1.self_attn.k_proj.k_scale"] = torch.ones(1)
        stored[f"{O_PROJ}.weight_zero_point"] = torch.zeros(64, 1, dtype=torch.int8)
        stored[f"{O_PROJ}.weight_g_idx"] = columns
        stored[f"{O_PROJ}.weight_scale"] = stored[f"{O_PROJ}.weight_scale"].view(-1).clone()

    rewrite(packed, add)
    check_weights(packed, dense)
    rewrite(packed, lambda stored: stored[f"{O_PROJ}.weight_g_idx"].fill_(-1))
    check_weights(packed, dense)


def test_compressed_columns_in_another_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`weight_g_idx`: which group each column is of."""
    packed, dense = made("ct-int4", tmp_path)
    groups = torch.arange(64, dtype=torch.int32).flip(0) // 32
    scales = load_file(packed / WEIGHTS)[f"{O_PROJ}.weight_scale"].float()

    def turn(stored: dict[str, torch.Tensor]) -> None:
        stored[f"{O_PROJ}.weight_g_idx"] = groups

    def expect(stored: dict[str, torch.Tensor]) -> None:
        integers = stored[f"{O_PROJ}.weight"] / scales.repeat_interleave(32, 1)
        stored[f"{O_PROJ}.weight"] = integers.round() * scales[:, groups]

    rewrite(packed, turn)
    rewrite(dense, expect)
    output = check_weights(packed, dense).layers[1].output
    assert isinstance(output, Quantised)
    assert output.order is not None
    check_logprobs(packed, dense, caplog)
