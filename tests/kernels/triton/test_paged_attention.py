"""Whole steps of interpreted attention: random mixes of rows and options, compared with the
reference."""

import numpy as np
import pytest
import torch

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.triton import TRITON, attention, attention_plan
from rootlace.kernels.triton.attention import AttentionRules
from rootlace.kernels.triton.attention_plan import SharingRule, SplitRule
from tests.kernels.cases import (
    FP8,
    INTEGERS,
    AttentionCase,
    AttentionTensors,
    make_attention,
    poisoned_memory,
)

CPU = torch.device("cpu")
# Contexts of a test are short: what is worth cutting or sharing on a GPU never is.
SHARING = SharingRule(node_bytes=0, step_bytes=0, least_segment=16, unit=16)
RULES = AttentionRules(split=SplitRule(least=32, most=4), sharing=SHARING)


SEEDS = 12


def random_case(seed: int) -> AttentionCase:
    """Rows in the order of a tree: a prefix of some of the first ones, strangers behind."""
    random = np.random.default_rng(seed)
    block_size = int(random.choice([1, 8, 16, 32]))
    rows, shared = [], []
    for _ in range(int(random.integers(1, 4))):
        prefix = int(random.integers(0, 90)) // block_size * block_size
        first = len(rows)
        for _ in range(int(random.integers(1, 5))):
            new = int(random.choice([1, 1, 1, 2, 7, 40]))
            rows.append((new, max(prefix, 1) + new + int(random.integers(0, 40))))
        if prefix and len(rows) > first + 1:
            shared.append((first, len(rows), prefix))
    window = random.choice([0, 0, 12, 50])
    return AttentionCase(
        rows=tuple(rows),
        shared=tuple(shared),
        block_size=block_size,
        heads=[(4, 2), (6, 2), (3, 3), (8, 1)][int(random.integers(4))],
        head_dim=int(random.choice([16, 24, 32])),
        kv_dtype=FP8 if random.random() < 0.3 else None,
        window=int(window) or None,
        soft_cap=float(random.choice([0.0, 0.0, 5.0])),
        scale=None if random.random() < 0.5 else 0.1,
    )


def run(kernels: KernelSet, tensors: AttentionTensors) -> tuple[torch.Tensor, torch.Tensor]:
    plan = kernels.plan_attention(tensors.batch, tensors.case.window)
    bound = plan.bind([torch.from_numpy(array) for array in plan.arrays])
    with torch.inference_mode(), poisoned_memory():
        out, lse = kernels.paged_attention(
            tensors.q,
            tensors.k_cache,
            tensors.v_cache,
            bound,
            want_lse=True,
            **tensors.options(),  # type: ignore[arg-type]
        )
    assert lse is not None
    return out, lse


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_steps(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(attention_plan, "SPLIT", 64)
    # AttentionRules() is what plans are made by where nobody says otherwise.
    monkeypatch.setattr(attention, "AttentionRules", lambda: RULES)
    tensors = make_attention(random_case(seed), CPU, seed)
    expected, expected_lse = run(REFERENCE, tensors)
    found, lse = run(TRITON, tensors)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kv_dtype", INTEGERS)
def test_integers_are_read_as_what_they_stand_for(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype
) -> None:
    """To the bit: own parts and shared nodes of decode rows, rows with several new tokens."""
    monkeypatch.setattr(attention_plan, "SPLIT", 64)
    monkeypatch.setattr(attention, "AttentionRules", lambda: RULES)
    rows = ((1, 70), (1, 90), (1, 51), (7, 100), (40, 45))
    for dtype, head_dim, window in (
        (torch.bfloat16, 24, None), (torch.float32, 64, 30), (torch.bfloat16, 40, None),
    ):  # fmt: skip
        case = AttentionCase(
            rows, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, window=window,
            shared=((0, 3, 48),),
        )  # fmt: skip
        tensors = make_attention(case, CPU)
        found, expected = run(TRITON, tensors), run(TRITON, tensors.plain())
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        assert found[0].isfinite().all()


def test_the_random_steps_have_everything() -> None:
    cases = [random_case(seed) for seed in range(SEEDS)]
    assert any(case.shared for case in cases)
    assert any(case.window and case.kv_dtype == FP8 for case in cases)
    assert {case.soft_cap > 0 for case in cases} == {True, False}
    assert any({new for new, _ in case.rows} >= {1, 40} for case in cases)
    assert len({case.heads for case in cases}) == 4
