"""The gather of embeddings in Triton against indexing."""

import pytest
import torch

from rootlace.kernels.triton import TRITON
from tests.kernels.pointwise_cases import check_embedding

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("shape", [(5, 8), (20, 100), (3, 1030)])
def test_embedding(shape: tuple[int, int], tokens: int) -> None:
    check_embedding(TRITON, DEVICE, shape, tokens)


def test_a_transposed_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="adjacent"):
        TRITON.embedding(torch.zeros(4, 6, device=DEVICE).t(), torch.zeros(1, dtype=torch.int64))
