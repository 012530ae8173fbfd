"""Values of a GGUF file's weights, compared with the `gguf` package."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rootlace.kernels.native.linear import prepared
from rootlace.kernels.reference.layers import dequantise
from rootlace.kernels.weights import Quantised, tensors
from rootlace.runtime.model.checkpoint.quantised.blocks import READERS
from rootlace.runtime.model.checkpoint.quantised.layouts import FLOATS
from rootlace.runtime.model.checkpoint.quantised.reading import of_blocks
from rootlace.runtime.model.gguf.file import CODES, TYPES, GgufFile, Tensor, check_types
from rootlace.wire.errors import UnsupportedModel

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

ROWS, BLOCKS = 5, 3
KIND = {kind.name: kind for kind in TYPES.values()}
BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 8.5, "Q5_1": 9.0, "MXFP4": 4.5}
BITS |= {"Q4_K": 4.625, "Q5_K": 8.625, "Q6_K": 8.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125}
"""Bits of a weight in memory, scales included. Codes of five and six bits take eight; scales of
four to six bits take a byte."""


def file_of(name: str, shape: tuple[int, ...]) -> GgufFile:
    path = Path("m.gguf")
    tensor = Tensor("blk.0.ffn_up.weight", KIND[name], shape, path, 0, memoryview(b""))
    return GgufFile(path, {}, {tensor.name: tensor})


def quantised(name: str, data: np.ndarray) -> Quantised:
    blocks = torch.from_numpy(data).view(len(data), -1, KIND[name].bytes)
    return of_blocks(name, blocks)


def random_blocks(name: str, seed: int) -> np.ndarray:
    """Bytes in which nothing is infinite or no number: any code may be there."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (ROWS, BLOCKS, KIND[name].bytes), dtype=np.uint8)
    places = {"Q6_K": [209], "MXFP4": [], "Q4_1": [1, 3], "Q5_1": [1, 3]}
    places |= {"Q4_K": [1, 3], "Q5_K": [1, 3]}
    for place in places.get(name, [1]):
        data[..., place] &= 0xBF  # float16 of less than 2
    if name == "MXFP4":
        data[..., 0] %= 250
        data[0, :, 0] = [0, 1, 2]  # scales below what float32's exponents reach
    return data.reshape(ROWS, -1)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("seed", range(5))
def test_dequantised_as_the_gguf_package_does(name: str, seed: int) -> None:
    data = random_blocks(name, seed)
    columns = BLOCKS * KIND[name].numbers
    found = dequantise(quantised(name, data)).numpy()
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[name])
    assert found.shape == expected.shape == (ROWS, columns)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", READERS)
def test_bits_of_a_weight(name: str) -> None:
    """Bits of a weight as read, and as packed."""
    weight = quantised(name, random_blocks(name, 0))
    for one in (weight, prepared(weight)):
        size = sum(tensor.nbytes for tensor in tensors(one))
        assert size * 8 / (ROWS * BLOCKS * KIND[name].numbers) == BITS[name]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_rounded_by_the_gguf_package(name: str) -> None:
    weights = np.random.default_rng(1).standard_normal((8, 96), dtype=np.float32)
    data = gguf.quantize(weights, gguf.GGMLQuantizationType[name])
    found = dequantise(quantised(name, data)).numpy()
    assert np.abs(found - weights).max() < (0.03 if name == "Q8_0" else 1.0)
    assert np.allclose(found, gguf.dequantize(data, gguf.GGMLQuantizationType[name]), atol=1e-6)


@pytest.mark.parametrize("name", sorted(KIND.keys() - FLOATS - CODES.keys()))
def test_other_types_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"ffn_up\.weight .* stored as {name}, .*Q4_K_M"):
        check_types(file_of(name, (1, 256)))


def test_vectors_are_floats() -> None:
    with pytest.raises(UnsupportedModel, match="is stored as Q8_0"):
        check_types(file_of("Q8_0", (32,)))


def test_every_layout_has_a_reader() -> None:
    assert CODES.keys() == READERS.keys()
    for name, codes in CODES.items():
        assert quantised(name, random_blocks(name, 0)).kind == codes
