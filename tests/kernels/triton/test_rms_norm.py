"""RMSNorm in Triton against float64 and the reference."""

import pytest
import torch

from rootlace.kernels.triton import TRITON
from rootlace.kernels.triton.layers import WIDEST_NORM
from tests.kernels.pointwise_cases import check_add_rms_norm, check_rms_norm, normal

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 96), (2, 3, 80), (2, 1000), (0, 64), (5, 1)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_rms_norm(TRITON, DEVICE, shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (4, 96), (2, 1000), (0, 64)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_add_rms_norm(TRITON, DEVICE, shape, dtype)


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    x = normal(7, 200, dtype=torch.bfloat16, device=DEVICE)
    weight = normal(200, dtype=torch.bfloat16, device=DEVICE, seed=1)
    batch = TRITON.rms_norm(x, weight, 1e-6)
    for row in range(len(x)):
        assert torch.equal(TRITON.rms_norm(x[row : row + 1], weight, 1e-6)[0], batch[row])


def test_columns_that_are_not_adjacent() -> None:
    x = normal(6, 40, dtype=torch.float32, device=DEVICE)
    weight = normal(6, dtype=torch.float32, device=DEVICE, seed=1)
    found = TRITON.rms_norm(x.t(), weight, 1e-6)
    assert torch.equal(found, TRITON.rms_norm(x.t().contiguous(), weight, 1e-6))


def test_a_zero_row_stays_zero() -> None:
    x = torch.zeros(1, 33, device=DEVICE)
    found = TRITON.rms_norm(x, torch.ones(33, device=DEVICE), 1e-6)
    assert torch.equal(found, x)


def test_a_row_too_wide_is_refused() -> None:
    x = torch.zeros(1, WIDEST_NORM + 1, device=DEVICE)
    with pytest.raises(ValueError, match="columns"):
        TRITON.rms_norm(x, torch.ones(WIDEST_NORM + 1, device=DEVICE), 1e-6)
