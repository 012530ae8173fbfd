"""Layouts of quantised weights: answers by hand, and of a converter."""

import pytest
import torch
from compressed_tensors.entrypoints.convert import AutoAWQConverter

from rootlace.kernels.reference.layers import dequantise
from rootlace.runtime.model.checkpoint.quantised.layouts import Awq, Block, Gptq, PackedInts
from rootlace.runtime.model.checkpoint.quantised.reading import read_weight
from tests.model import quantised_checkpoints as writers


@pytest.mark.parametrize("groups", [[0] * 32 + [1] * 16, [1] * 16 + [0] * 32, [1] * 30 + [0] * 18])
def test_stated_groups_of_unlike_sizes(groups: list[int]) -> None:
    """The last of two groups has 16 columns; the file gives the other sizes."""
    integers = torch.randint(0, 16, (16, 48))
    shifts = torch.arange(0, 32, 4)
    words = (integers.view(16, 6, 8) << shifts).sum(2)
    scales = torch.tensor([[1.0, 10.0]]).expand(16, 2) + torch.arange(16.0).view(16, 1)
    zeros = torch.randint(-8, 8, (16, 2), dtype=torch.int8)
    stored = {
        ".weight_packed": words.to(torch.uint32).view(torch.int32),
        ".weight_scale": scales.contiguous(),
        ".weight_zero_point": zeros,
        ".weight_g_idx": torch.tensor(groups, dtype=torch.int32),
    }
    found = dequantise(read_weight(PackedInts(4, Block(1, 32), symmetric=False), stored, 16, 48))
    wanted = (integers - 8 - zeros[:, groups]) * scales[:, groups]
    assert torch.equal(found, wanted)


def test_gptq_known_answer() -> None:
    """0x76543210 has the integers 0 ... 7 of inputs 0 ... 7; zero points are stored less one."""
    stored = {
        ".qweight": torch.tensor([[0x76543210] * 8], dtype=torch.int32),
        ".qzeros": torch.tensor([[0x76543210]], dtype=torch.int32),
        ".scales": torch.full((1, 8), 0.5),
    }
    found = dequantise(read_weight(Gptq(4, None, minus_one=True), stored, 8, 8))
    wanted = [[0.5 * (i - (o + 1)) for i in range(8)] for o in range(8)]
    assert found.tolist() == wanted


def test_awq_known_answer() -> None:
    """0x75316420 has the integers 0 ... 7 of outputs 0 ... 7."""
    stored = {
        ".qweight": torch.tensor([[0x75316420], [0x11111111]], dtype=torch.int32),
        ".qzeros": torch.tensor([[0x22222222]], dtype=torch.int32),
        ".scales": torch.arange(1.0, 9.0).view(1, 8),
    }
    found = dequantise(read_weight(Awq(None), stored, 8, 2))
    assert found.tolist() == [[(o + 1.0) * (o - 2), (o + 1.0) * -1] for o in range(8)]


def test_awq_as_its_converter_reads_it() -> None:
    """compressed-tensors converts AWQ's files by code of its own."""
    _, write = writers.awq(32)
    tensors, wanted = write("", torch.randn(40, 96))
    values, scales, zeros = AutoAWQConverter(group_size=32)._convert_gemm_module(
        tensors[".qweight"], tensors[".scales"], tensors[".qzeros"]
    )
    shifted = values.view(40, 3, 32) - zeros.unsqueeze(2)
    assert torch.equal((shifted * scales.float().unsqueeze(2)).view(40, 96), wanted)
