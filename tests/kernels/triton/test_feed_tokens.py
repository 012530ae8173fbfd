"""Tokens of the step before put in their places, in Triton and by the reference."""

import numpy as np
import pytest
import torch

from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.triton import TRITON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("kernels", [REFERENCE, TRITON], ids=["reference", "triton"])
@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_feed_tokens(kernels: object, count: int) -> None:
    rng = np.random.default_rng(count)
    ids = rng.integers(0, 1 << 17, count)
    found = rng.integers(-1, 1 << 17, 9).astype(np.int32)
    feeds = rng.integers(-4, 9, count).clip(-1)
    expected = [
        max(int(found[feed]), 0) if feed >= 0 else int(token)
        for token, feed in zip(ids, feeds, strict=True)
    ]
    given = [torch.from_numpy(array).to(DEVICE) for array in (ids, feeds, found)]
    out = kernels.feed_tokens(*given)  # type: ignore[attr-defined]
    assert out.dtype == torch.int64 and out.tolist() == expected
    assert torch.equal(given[0].cpu(), torch.from_numpy(ids))
