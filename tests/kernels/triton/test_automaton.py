"""Steps of automata in Triton against the reference."""

import msgspec
import numpy as np
import pytest
import torch

from rootlace.kernels.interface import AutomatonTables
from rootlace.kernels.reference import REFERENCE
from rootlace.kernels.triton import TRITON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("count", [0, 1, 128, 300])
def test_steps_of_automata(count: int) -> None:
    random = np.random.default_rng(count)
    vocab, states, entries = 40, 30, 500

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(random.integers(low, high, shape).astype(np.int32))

    tables = AutomatonTables(
        mask_of=numbers(0, 9, states),
        class_row=numbers(0, 3, states),
        next_start=numbers(0, entries - 6, states),
        next_state=numbers(0, states, entries),
        token_class=numbers(0, 6, 3, vocab),
        masks=numbers(0, 9, 9, 2),
    )
    given = (
        numbers(-1, states, count),
        numbers(-1, 20, count),
        numbers(-1, vocab + 1, 20),
        numbers(-1, 9, count),
    )
    moved = {n: table.to(DEVICE) for n, table in msgspec.structs.asdict(tables).items()}
    found = TRITON.step_automata(*(x.to(DEVICE) for x in given), AutomatonTables(**moved))
    for one, other in zip(found, REFERENCE.step_automata(*given, tables), strict=True):
        assert one.dtype == torch.int32 and torch.equal(one.cpu(), other)
