"""Log-probabilities in Triton against float64."""

import importlib

import pytest
import torch

from rootlace.kernels.triton.launching import Launch
from rootlace.kernels.triton.logits import token_logprobs

module = importlib.import_module("rootlace.kernels.triton.logits")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def scored(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(logits) + 1,), 77.0, device=DEVICE)
    token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), out[:-1])
    assert out[-1] == 77
    return out[:-1].cpu()


@pytest.mark.parametrize("tile", [64, 4096])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(
    monkeypatch: pytest.MonkeyPatch, vocab: int, dtype: torch.dtype, tile: int
) -> None:
    monkeypatch.setattr(module, "settings", lambda kernel, arch: Launch({"TILE": tile}, 2, 1))
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(6, vocab, generator=generator) * 9 + 40).to(dtype)
    if vocab > 64:
        logits[1, :64] = float("-inf")  # a tile, or part of one
    tokens = torch.randint(0, vocab, (6,), generator=generator, dtype=torch.int32)
    tokens[4] = -1
    found = scored(logits, tokens)
    expected = logits.double().log_softmax(1).gather(1, tokens.long().clamp(min=0)[:, None])[:, 0]
    assert found[4].isnan()
    kept = torch.arange(6) != 4
    torch.testing.assert_close(found[kept].double(), expected[kept], atol=2e-5, rtol=1e-5)
    # Whoever is beside it: the same bits.
    for row in range(4):
        assert scored(logits[row : row + 1], tokens[row : row + 1]) == found[row]


def test_no_rows_and_a_new_tensor() -> None:
    logits = torch.zeros(3, 8, device=DEVICE)
    tokens = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert token_logprobs(logits[:0], tokens[:0]).shape == (0,)
    found = token_logprobs(logits, tokens).cpu()
    torch.testing.assert_close(found, torch.full((3,), 1 / 8).log())
