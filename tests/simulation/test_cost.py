"""Cost models: read, refused, and added up."""

import json
from pathlib import Path

import numpy as np
import pytest

from rootlace.runtime.contracts.plan import StepCost
from rootlace.runtime.simulation.engine import (
    DEFAULT_COST,
    BadCost,
    known_costs,
    read_cost,
    time_step,
)

NONE = np.empty(0, np.int64)


def test_those_that_come_along() -> None:
    assert DEFAULT_COST in known_costs()
    for name in known_costs():
        cost = read_cost(name)
        assert cost.source.startswith("Stated, not measured" if "roofline" in name else "Measured")
        assert cost.step > 0 and cost.prefill > 0


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"step": 1, "prefill": 0.5, "source": "here", "r_squared": 0.9}))
    assert read_cost(str(path)) == StepCost(step=1.0, prefill=0.5, source="here")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cost.json: Input data was truncated"),
        ('{"step": 1}', "missing required field `prefill`"),
        ('{"step": "1", "prefill": 1}', "Expected `float`"),
        ('{"step": -1, "prefill": 1}', r">= 0.0 - at `\$.step`"),
        ('{"step": 1e999, "prefill": 1}', "out of range"),
        ('{"step": 0, "prefill": 0}', "must take time"),
        ('{"step": 1, "prefill": 1, "max_step_tokens": 0}', r">= 1 - at `\$.max_step_tokens`"),
    ],
)
def test_a_bad_file(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(BadCost, match=says):
        read_cost(str(path))


def test_an_unknown_name() -> None:
    with pytest.raises(BadCost, match=f"neither a file nor a known cost model .*{DEFAULT_COST}"):
        read_cost("abacus")


def test_one_step() -> None:
    cost = StepCost(1.0, 0.1, 0.01, 0.001, 0.0001, max_step_tokens=100)
    times = time_step(
        cost, np.array([10, 20]), np.array([10, 50]), np.array([1, 1]), np.array([5, 7])
    )
    pairs = 10 * 5 + 20 * 40
    total = 1.0 + 3.0 + 0.02 + 0.012 + 0.0001 * pairs
    assert times.total == pytest.approx(total) and times.steps == 1
    # All results of a step are ready at its end.
    assert times.chunks == pytest.approx([total, total])
    assert times.rows == pytest.approx([total, total])


def test_a_run_of_steps() -> None:
    """Equals the same work step by step: 3 rows decode 4, 4 and 2 tokens; 20 prompt tokens."""
    cost = StepCost(1.0, 0.1, max_step_tokens=10)
    times = time_step(
        cost, np.array([9, 11]), np.array([9, 11]), np.array([4, 4, 2]), np.array([0, 0, 0])
    )
    # Prompt tokens of the steps, 7 at most: 7, 2 + 5, 6, 0.
    ends = np.cumsum([1.7, 1.7, 1.6, 1.0])
    assert times.steps == 4 and times.total == pytest.approx(ends[3])
    assert times.chunks == pytest.approx([ends[1], ends[2]])
    assert times.rows == pytest.approx([ends[3], ends[3], ends[1]])


def test_prompts_alone_and_rows_alone() -> None:
    cost = StepCost(1.0, 0.1, 0.01, max_step_tokens=10)
    chunks = time_step(cost, np.array([25]), np.array([25]), NONE, NONE)
    assert chunks.total == pytest.approx(3 + 2.5) and chunks.steps == 3
    rows = time_step(cost, NONE, NONE, np.array([16, 16]), np.array([3, 3]))
    assert rows.total == pytest.approx(16 + 0.32) and rows.steps == 16
    assert len(rows.chunks) == 0
