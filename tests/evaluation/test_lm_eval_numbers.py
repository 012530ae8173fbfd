"""Log-likelihoods, responses and scores of a trained model are lm-eval's, row by row."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import rootlace as rl
from rootlace.evaluation.run import evaluate
from rootlace.evaluation.task import ready_task
from tests.evaluation.lm_eval_cases import CASES, KEPT, Case

pytestmark = pytest.mark.slow

FOUND = json.loads(KEPT.read_text())


@pytest.fixture(scope="module")
def stories(shared_dir: Path) -> Iterator[rl.Runtime]:
    folder = shared_dir / "data" / "models" / FOUND["about"]["model"]
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}")
    with rl.Runtime(folder, dtype="float32", device="cpu", threads=1) as runtime:
        yield runtime


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_are_those_of_lm_eval(case: Case, stories: rl.Runtime, shared_dir: Path) -> None:
    rows, examples = case.files(shared_dir / "data")
    given = {"data": rows, "shots.count": case.shots, "limit": case.limit, **case.ours}
    if case.examples:
        given["shots.data"] = examples
    run = evaluate(ready_task(case.format, given), stories)
    assert not run.failures
    found = FOUND["cases"][case.name]
    assert len(run.records) == len(found["rows"])
    for record, expected in zip(run.records, found["rows"], strict=True):
        if isinstance(expected, str):
            # There, tokens are decoded by themselves: without the space before the first word.
            assert record.response.strip() == expected.strip()
        else:
            said = [*record.log_likelihoods, *record.alone]
            assert said == pytest.approx(expected, abs=2e-4)
    for metric, scores in found["metrics"].items():
        name = {"strict-match": "strict", "flexible-extract": "flexible"}.get(metric, metric)
        assert [record.scores[name] for record in run.records] == scores
