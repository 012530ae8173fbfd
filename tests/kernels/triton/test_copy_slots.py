"""Copying cache slots in Triton: the copies arrive, everything else stays."""

import pytest
import torch

from rootlace.kernels.triton import TRITON
from tests.kernels.cases import FP8
from tests.kernels.pointwise_cases import check_copy_slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize(
    ("shape", "copies"),
    [((4, 3, 16, 2, 8), 5), ((1, 2, 4, 3, 10), 1), ((2, 1, 3, 9, 130), 1), ((2, 2, 2, 1, 8), 0)],
)
def test_copy_slots(shape: tuple[int, int, int, int, int], copies: int, dtype: torch.dtype) -> None:
    check_copy_slots(TRITON, DEVICE, shape, copies, dtype)


def test_layers_may_lie_apart() -> None:
    """A slice of layers comes from a pool whose keys and values are separate axes."""
    pool = torch.arange(4 * 2 * 3 * 2 * 1 * 8.0, device=DEVICE).view(4, 2, 3, 2, 1, 8)
    expected = pool.clone()
    expected[:, 1].view(4, 6, 8)[:, 5] = expected[:, 1].view(4, 6, 8)[:, 0]
    TRITON.copy_slots(
        pool[:, 1], torch.tensor([0], device=DEVICE), torch.tensor([5], device=DEVICE)
    )
    assert torch.equal(pool, expected)


def test_a_layer_that_is_not_contiguous_is_refused() -> None:
    cache = torch.zeros(2, 3, 4, 2, 8, device=DEVICE).transpose(2, 3)
    slots = torch.tensor([0], device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        TRITON.copy_slots(cache, slots, slots + 1)
