"""What `benchmarks.evaluation` asks of every engine, and how choices are read."""

import json
from pathlib import Path

from benchmarks.evaluation import LOADS, chosen, requests_of
from rootlace.evaluation.questions import read_questions


def test_requests_and_choices(tmp_path: Path) -> None:
    (tmp_path / "hellaswag").mkdir()
    rows = [{"query": f"q{i}", "choices": ["a", "b", "c"], "gold": 1} for i in range(24)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "hellaswag" / "rc_5shot.jsonl").write_text(lines)
    questions = read_questions(LOADS["hellaswag"].task(tmp_path, 2))
    before = "".join(f"q{i} b\n\n" for i in range(20))
    asked = [(f"{before}q{i}", f" {choice}") for i in (20, 21) for choice in "abc"]
    assert requests_of(questions, " ") == asked
    assert chosen([-3.0, -1.0, -2.0, -1.0, -1.0, -5.0], questions) == [1, 0]
