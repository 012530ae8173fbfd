"""Masks that are filled while the model runs."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from rootlace.runtime.config import CacheConfig, ExecutorConfig
from rootlace.runtime.contracts.plan import MaskRow
from rootlace.runtime.model.executor.plain_steps import PlainSteps
from rootlace.runtime.model.executor.runner import ModelRunner
from tests.model.plans import Blocks, Row, Work, make_plan


class Table:
    """Two rows that are filled only when `fill` is called, in an array that replaces the first."""

    key = 2**40

    def __init__(self, words: int) -> None:
        self.rows = np.zeros((1, words), np.int32)
        self._full = False

    def filled(self, row: int) -> bool:
        return self._full

    def fill(self) -> None:
        self.rows = np.zeros((2, self.rows.shape[1]), np.int32)
        self.rows[1, 5] = 1 << 7
        self._full = True


def test_sampling_waits_for_masks_after_the_forward_pass(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner.load(
        ExecutorConfig(model=str(demo_model), device="cpu"), CacheConfig(num_blocks=8), 64, 8
    )
    words = -(-runner.vocab_size // 32)
    table = Table(words)
    alone = np.zeros(words, np.int32)
    events: list[str] = []

    def wait() -> None:
        events.append("wait")
        table.fill()
        alone[3] = 1 << 2

    steps = runner._steps
    assert isinstance(steps, PlainSteps)
    forward = steps._forward.run
    monkeypatch.setattr(
        steps._forward, "run", lambda plan: (events.append("forward"), forward(plan))[1]
    )
    blocks = Blocks(8, runner.block_size)
    work = [Work(Row(blocks, [5, 6, 7]), mask=mask) for mask in (alone, MaskRow(table, 1), None)]
    plan = msgspec.structs.replace(make_plan(work), wait_for_masks=wait)
    result = runner.run(plan)
    assert events == ["forward", "wait"]
    assert result.token_ids[:2].tolist() == [32 * 3 + 2, 32 * 5 + 7]
    assert result.token_ids[2] not in (98, 167)
