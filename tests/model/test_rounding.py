"""Weights that are rounded during reading (`quantize`)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from rootlace.kernels.reference.layers import INT4, INT8, ROWS, dense, dequantise, quantise
from rootlace.kernels.weights import Dense, Quantised, Scheme, Stacked, rows_of
from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.model.checkpoint.config import ModelConfig
from rootlace.runtime.model.checkpoint.loader import load_weights, rounded
from rootlace.runtime.model.checkpoint.sizes import weight_bytes
from rootlace.runtime.model.checkpoint.weights import ModelWeights
from rootlace.runtime.model.executor.runner import ModelRunner
from rootlace.wire.errors import InvalidRequest
from tests.model.checkpoints import configs, save
from tests.model.plans import Blocks, Row, Work, make_plan
from tests.model.quantised_checkpoints import gptq, quantised
from tests.model.weight_sizes import num_bytes
from tests.native import skip_without

CPU = torch.device("cpu")
PRODUCTS = ("qkv", "output", "gate_up", "down")
CODES: tuple[Any, ...] = ("int8", "int4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    save(configs()["qwen3-biased"], path)
    return path


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_products_are_rounded_and_nothing_else(folder: Path, codes: Any) -> None:
    config = ModelConfig.read(folder)
    reported: list[str] = []
    given = (config, torch.float32, CPU)
    weights = rounded(load_weights, codes)(*given, lambda what, _: reported.append(what))
    plain = load_weights(*given)
    assert torch.equal(weights.embedding, plain.embedding)
    head, plain_head = weights.head, plain.head
    assert isinstance(head, Quantised) and isinstance(plain_head, Dense)
    fitting = plain_head.shape[1] % 32 == 0
    assert head.scheme == (INT8 if codes == "int8" and fitting else ROWS)
    assert torch.equal(dequantise(head), dequantise(quantise(plain_head.matrix, head.scheme)))
    assert len(weights.layers) == len(plain.layers)
    for layer, before in zip(weights.layers, plain.layers, strict=True):
        for name in PRODUCTS:
            weight, numbers = getattr(layer, name), getattr(before, name)
            parts = [(weight, numbers)]
            apart = (name, codes) == ("qkv", "int4") and numbers.shape[1] % 32 == 0
            assert isinstance(weight, Stacked) == apart
            if apart:
                keys = config.spec.attention.num_kv_heads * config.spec.attention.head_dim
                rows = torch.arange(numbers.shape[0]).split([numbers.shape[0] - keys, keys])
                parts = [(a, rows_of(numbers, b)) for a, b in zip(weight.parts, rows, strict=True)]
            for at, (part, some) in enumerate(parts):
                scheme = scheme_for(some, "int8" if at else codes)
                assert part.scheme == scheme
                assert torch.equal(dequantise(part), dequantise(quantise(some.matrix, scheme)))
                assert (part.bias is None) == (some.bias is None)
        assert torch.equal(layer.input_norm, before.input_norm)  # type: ignore[arg-type]
    assert reported[-1] == f"layer {len(plain.layers)} of {len(plain.layers)}"
    assert [layer.down.shape for layer in weights.layers[:2]] == [plain.layers[0].down.shape] * 2


def test_rows_too_small_for_scales_in_float16_keep_their_own(folder: Path) -> None:
    """A pruned row stands beside others: a matrix's largest number says nothing of its rows."""
    matrix = torch.randn((48, 64), generator=torch.Generator().manual_seed(1)) / 50
    matrix[5] *= 1e-5
    matrix[7] = 0

    def load(*given: Any) -> ModelWeights:
        return replace(load_weights(*given), head=Dense(matrix))

    head = rounded(load, "int8")(ModelConfig.read(folder), torch.float32, CPU, None).head
    assert isinstance(head, Quantised)
    off = (dequantise(head) - matrix).norm(dim=1) / matrix.norm(dim=1).clamp(min=1e-30)
    assert head.scheme == ROWS and float(off.max()) < 0.02
    assert float((dequantise(quantise(matrix, INT8)) - matrix)[5].norm() / matrix[5].norm()) > 0.1


def scheme_for(numbers: Any, codes: str) -> Scheme:
    return ROWS if numbers.shape[1] % 32 else {"int8": INT8, "int4": INT4}[codes]


def test_experts_are_rounded_and_what_chooses_them_is_not(tmp_path: Path) -> None:
    save(configs()["qwen2_moe"], tmp_path)
    config = ModelConfig.read(tmp_path)
    weights = rounded(load_weights, "int4")(config, torch.float32, CPU)
    layer, dense = weights.layers[1], load_weights(config, torch.float32, CPU).layers[1]
    for name in ("router", "shared_gate"):
        assert torch.equal(dequantised(layer.part(name)), dense.part(name).matrix)
    for name in ("gate_up", "experts.0.gate_up", "experts.5.down"):
        numbers = dense.part(name).matrix
        expected = dequantise(quantise(numbers, scheme_for(numbers, "int4")))
        assert torch.equal(dequantised(layer.part(name)), expected)
    sizes = [
        weight_bytes(config, torch.float32, quantize, head_apart=False)
        for quantize in ("none", "int8", "int4")
    ]
    plain = num_bytes(load_weights(config, torch.float32, CPU))
    assert sizes[0] == plain
    found = [rounded(load_weights, codes)(config, torch.float32, CPU) for codes in CODES]
    # Scales of rows are not counted, and neither is what has fewer or more bits for its size.
    for said, one in zip(sizes[1:], found, strict=True):
        assert said == pytest.approx(num_bytes(one), rel=0.07)


def dequantised(weight: Any) -> torch.Tensor:
    return weight.matrix if isinstance(weight, Dense) else dequantise(weight)


def numbers_of(weights: ModelWeights) -> ModelWeights:
    """Replace codes by their values."""

    layers = tuple(
        layer.with_products(lambda weight: dense(weight, torch.float32)) for layer in weights.layers
    )
    assert weights.head is not None
    return replace(weights, layers=layers, head=dense(weights.head, torch.float32))


def numbers(codes: Any) -> Any:
    return lambda *given: numbers_of(rounded(load_weights, codes)(*given))


def logits(model: Path, kernels: Any, quantize: Any, weights_of: Any) -> np.ndarray:
    executor = ExecutorConfig(
        model=str(model), kernels=kernels, quantize=quantize, dtype="float32", device="cpu"
    )
    runner = ModelRunner.load(executor, CacheConfig(4, 16), 64, 8, weights_of=weights_of)
    plan = make_plan([Work(Row(Blocks(16, 4), [5, 150, 7, 32, 9, 11, 4, 77]))])
    forward = runner._steps._forward  # type: ignore[attr-defined]
    with torch.inference_mode():
        return forward.logits(forward.run(plan)).copy()


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(
    "name, codes",
    [("qwen3-biased", "int8"), ("qwen3-biased", "int4"), ("gemma3", "int8"), ("gpt_neox", "int4")],
)
def test_tokens_are_those_of_the_rounded_weights(
    tmp_path: Path, name: str, codes: Any, kernels: Any
) -> None:
    skip_without(kernels)
    save(configs()[name], tmp_path)
    found = logits(tmp_path, kernels, codes, load_weights)
    assert np.array_equal(found, logits(tmp_path, kernels, "none", numbers(codes)))
    assert not np.array_equal(found, logits(tmp_path, kernels, "none", load_weights))


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_experts_of_unlike_schemes(tmp_path: Path, kernels: Any) -> None:
    """One expert has a row too small for scales in float16."""
    skip_without(kernels)
    config = configs()["qwen2_moe"]
    config.hidden_size = config.moe_intermediate_size = 64
    save(config, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        if ".experts.1.down_proj" in name:
            tensors[name][3] *= 1e-6
    save_file(tensors, file, {"format": "pt"})
    weights = rounded(load_weights, "int8")(ModelConfig.read(tmp_path), torch.float32, CPU, None)
    experts = weights.layers[0].experts
    assert experts is not None and {one.down.scheme for one in experts} == {INT8, ROWS}  # type: ignore[union-attr]
    found = logits(tmp_path, kernels, "int8", load_weights)
    assert np.array_equal(found, logits(tmp_path, kernels, "none", numbers("int8")))


def test_what_is_quantised_already_is_refused(folder: Path, tmp_path: Path) -> None:
    """Before anything is read where the configuration says so."""
    quantised(configs()["llama"], tmp_path, *gptq(4, 32))
    config = ModelConfig.read(tmp_path / "quantised")
    with pytest.raises(InvalidRequest, match=r"weights are quantised already .GPTQ"):
        rounded(pytest.fail, "int4")(config, torch.float32, CPU, None)
    once = rounded(load_weights, "int8")
    with pytest.raises(InvalidRequest, match="weights are quantised already"):
        rounded(once, "int4")(ModelConfig.read(folder), torch.float32, CPU, None)
