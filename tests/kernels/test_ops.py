"""Each reference kernel against its formula in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from rootlace.kernels.dispatch import kernels_for
from rootlace.kernels.interface import AutomatonTables
from rootlace.kernels.reference.kv_cache import write_kv
from rootlace.kernels.reference.layers import rope
from rootlace.kernels.reference.sampling import apply_masks

KERNELS = kernels_for(torch.device("cpu"))
DTYPES = [torch.float32, torch.bfloat16]
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1, shape)).to(dtype)


def close(found: torch.Tensor, exact: np.ndarray) -> None:
    tolerance = RELATIVE[found.dtype]
    np.testing.assert_allclose(found.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    weight = normal(50, 8, dtype=dtype)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(KERNELS.embedding(weight, ids), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    for rows, width, eps in itertools.product((1, 7), (8, 96, 300), (1e-6, 0.5)):
        x, weight = normal(rows, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
        wide = x.double().numpy()
        scale = 1 / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
        kept = x.clone()
        close(KERNELS.rms_norm(x, weight, eps), weight.double().numpy() * wide * scale)
        residual = normal(rows, width, dtype=dtype, seed=2)
        before = residual.clone()
        out, total = KERNELS.add_rms_norm(x, residual, weight, eps)
        close(total, wide + residual.double().numpy())
        assert torch.equal(out, KERNELS.rms_norm(total, weight, eps))
        assert torch.equal(x, kept)
        assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = normal(5, 24, dtype=dtype) * 3
    gate, up = np.split(x.double().numpy(), 2, axis=1)
    kept = x.clone()
    close(KERNELS.silu_mul(x), gate / (1 + np.exp(-gate)) * up)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(dtype: torch.dtype) -> None:
    x = normal(7, 96, dtype=dtype)
    weight, bias = normal(96, dtype=dtype, seed=1), normal(96, dtype=dtype, seed=2)
    for eps, added in itertools.product((1e-6, 0.5), (None, bias)):
        wide = x.double().numpy() - x.double().numpy().mean(-1, keepdims=True)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight.double().numpy()
        if added is not None:
            expected = expected + added.double().numpy()
        close(KERNELS.layer_norm(x, weight, added, eps), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_without_a_gate(dtype: torch.dtype) -> None:
    x = normal(5, 24, dtype=dtype) * 3
    wide = x.double().numpy()
    erf = np.vectorize(math.erf)(wide / math.sqrt(2))
    tanh = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    close(KERNELS.relu(x), np.maximum(wide, 0))
    close(KERNELS.gelu(x), wide / 2 * (1 + erf))
    close(KERNELS.gelu_tanh(x), wide / 2 * (1 + tanh))


@pytest.mark.parametrize("normed", [False, True])
def test_rope_is_a_rotation_of_pairs(normed: bool) -> None:
    """Dimensions i and i + D/2 are a complex number that turns by position * frequency_i."""
    tokens, dim = 6, 16
    q, k = normal(tokens, 4, dim), normal(tokens, 2, dim, seed=1)
    angle = np.arange(tokens)[:, None] * 10.0 ** -np.arange(dim // 2)
    cos, sin = torch.from_numpy(np.cos(angle)).float(), torch.from_numpy(np.sin(angle)).float()
    weights = (normal(dim, seed=3), normal(dim, seed=4)) if normed else (None, None)
    found = rope(q, k, cos, sin, *weights, eps=1e-6)
    for x, weight, y in zip((q, k), weights, found, strict=True):
        wide = x.double().numpy()
        if weight is not None:
            wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
            wide = wide * weight.double().numpy()
        turned = (wide[..., : dim // 2] + 1j * wide[..., dim // 2 :]) * np.exp(1j * angle)[:, None]
        close(y, np.concatenate([turned.real, turned.imag], axis=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("listed", [False, True])
def test_write_kv(dtype: torch.dtype, listed: bool) -> None:
    cache = torch.full((2, 5, 4, 3, 8), float("nan"), dtype=dtype)
    k, v = normal(3, 3, 8, dtype=dtype), normal(3, 3, 8, dtype=dtype, seed=1)
    # As the decoder passes them: slices of one fused tensor.
    fused = torch.cat((k, v), dim=1)
    tokens = [0, 1, 2, 1] if listed else [0, 1, 2]
    slots = [7, 0, 19, 12][: len(tokens)]
    index = torch.tensor(tokens) if listed else None
    write_kv(cache[0], cache[1], fused[:, :3], fused[:, 3:], torch.tensor(slots), index)
    flat = cache.view(2, 20, 3, 8)
    for token, slot in zip(tokens, slots, strict=True):
        assert torch.equal(flat[0, slot], k[token])
        assert torch.equal(flat[1, slot], v[token])
    rest = [slot for slot in range(20) if slot not in slots]
    assert flat[:, rest].isnan().all()


def test_copy_slots() -> None:
    cache = normal(6, 5, 4, 3, 8)
    before = cache.clone().view(6, 20, 3, 8)
    KERNELS.copy_slots(cache, torch.tensor([4, 5, 0]), torch.tensor([8, 9, 19]))
    after = cache.view(6, 20, 3, 8)
    assert torch.equal(after[:, [8, 9, 19]], before[:, [4, 5, 0]])
    rest = [slot for slot in range(20) if slot not in (8, 9, 19)]
    assert torch.equal(after[:, rest], before[:, rest])


@pytest.mark.parametrize("vocab", [31, 32, 33, 100])
@pytest.mark.parametrize("words", [1, 2, 4])
def test_apply_masks(vocab: int, words: int) -> None:
    """Rows may name one mask twice, or none (-1)."""
    allowed = np.random.default_rng(2).random((3, 32 * words)) < 0.5
    allowed[0, 31] = True  # the sign bit
    table = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    kept, kept_table = normal(4, vocab), table.clone()
    for rows in ([2, 0, -1, 2], [1, 0, 2, 1], [-1] * 4):
        logits = kept.clone()
        apply_masks(logits, table, torch.tensor(rows))
        for row, mask in enumerate(rows):
            may = np.pad(allowed[mask], (0, vocab))[:vocab] if mask >= 0 else np.ones(vocab, bool)
            expected = np.where(may, kept[row], -np.inf)
            np.testing.assert_array_equal(logits[row], expected)
    assert torch.equal(table, kept_table)


def test_step_automata() -> None:
    """Two automata, of 6 and 4 states and 3 and 2 classes, behind the dead state."""
    random = np.random.default_rng(5)
    vocab, states = 50, 11
    token_class = np.stack([random.integers(0, n, vocab) for n in (1, 3, 2)]).astype(np.int32)
    class_row = np.array([0] + [1] * 6 + [2] * 4, np.int32)
    next_start = np.array([0, *range(1, 19, 3), *range(19, 27, 2)], np.int32)
    next_state = np.zeros(27, np.int32)
    next_state[1:19] = random.integers(0, 7, 18)
    next_state[19:] = random.choice([0, 7, 8, 9, 10], 8)
    mask_of = np.array([0, *random.integers(1, 9, 10)], np.int32)
    tables = AutomatonTables(
        *map(torch.from_numpy, (mask_of, class_row, next_start, next_state, token_class)),
        masks=torch.zeros(9, 2, dtype=torch.int32),
    )
    tokens = np.array([*random.integers(0, vocab, 20), -1, vocab], np.int32)
    state = random.integers(-1, states, 200).astype(np.int32)
    source = random.integers(-1, len(tokens), 200).astype(np.int32)
    rows = random.integers(-1, 9, 200).astype(np.int32)
    found, masks = KERNELS.step_automata(
        *map(torch.from_numpy, (state, source, tokens, rows)), tables
    )
    assert found.dtype == masks.dtype == torch.int32
    for i in range(len(state)):
        after = int(state[i])
        if after >= 0 and source[i] >= 0:
            token = int(tokens[source[i]])
            known = 0 <= token < vocab
            after = (
                int(next_state[next_start[after] + token_class[class_row[after], token]])
                if known
                else 0
            )
        assert found[i] == after
        assert masks[i] == (mask_of[after] if after >= 0 else rows[i])
