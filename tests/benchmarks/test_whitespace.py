"""What `benchmarks.whitespace` asks and counts, and that constraints do not make a model worse."""

import json
import random
from pathlib import Path

import jsonschema

from benchmarks.whitespace import TASKS, Answer, Found, compared, first_value, main
from tests.real_model import SMOLLM2, needs_smollm2


def test_the_truth_is_in_the_question_and_fits_the_schema() -> None:
    for task in TASKS:
        rows = [task.row(random.Random(7)) for _ in range(2)]
        assert rows[0] == rows[1]
        source = random.Random(8)
        for _ in range(20):
            row = task.row(source)
            jsonschema.validate(row.truth, row.schema)
            values = row.truth.values() if isinstance(row.truth, dict) else row.truth[0].values()
            for value in values:
                said = f"{value:.2f}" if isinstance(value, float) else str(value)
                assert said in row.question or isinstance(value, bool)


def test_the_first_value_of_a_text_counts() -> None:
    assert first_value('Here: ```json\n{"a": [1]}\n``` and {"b": 2}') == {"a": [1]}
    assert first_value("a {b} [1, 2] c") == [1, 2]
    assert first_value("nothing {") is None


def test_rows_are_compared_one_by_one() -> None:
    def answers(*kinds: str) -> list[Answer]:
        return [Answer("q", kind, kind == "right", kind == "cut", 10, 0) for kind in kinds]

    free, held = (
        answers("right", "right", "cut", "wrong"),
        answers("right", "wrong", "right", "cut"),
    )
    none, mode = Found(4, 2, 1, 40, 0, 1.0), Found(4, 2, 1, 41, 0, 1.0)
    found = compared(mode, held, none, free)
    assert found["exact"]["met"] and found["tokens"]["value"] == 41 / 40
    assert found["cut_alone"] == {"target": "<= 0", "value": 1, "met": False}
    assert [one["text"] for one in found["worse"]] == ["wrong"]


@needs_smollm2
def test_a_constraint_does_not_make_the_real_model_worse(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    options = ["--rows", "6", "--tasks", "person", "--max-tokens", "60", "--json", str(file)]
    assert main(["--model", str(SMOLLM2), "--modes", "none", "flexible", *options]) == 0
    (found,) = json.loads(file.read_bytes())["tasks"].values()
    assert found["modes"]["none"]["exact"] >= 3
    assert {
        name: found["beside_none"]["flexible"][name]["met"] for name in ("exact", "tokens")
    } == {
        "exact": True,
        "tokens": True,
    }
    assert found["beside_none"]["flexible"]["cut_alone"]["met"]
