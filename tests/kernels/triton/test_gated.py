"""SwiGLU and GeGLU in Triton against float64 and the reference."""

import pytest
import torch

from rootlace.kernels.triton import TRITON
from tests.kernels.pointwise_cases import check_gated

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (3, 100), (2, 1024), (2, 1500), (0, 16)])
def test_gated(tokens: int, width: int, dtype: torch.dtype) -> None:
    check_gated(TRITON, DEVICE, tokens, width, dtype)


def test_columns_that_are_not_adjacent() -> None:
    wide = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(TRITON.silu_mul(wide.t()), TRITON.silu_mul(wide.t().contiguous()))
