"""Tasks and their rows are read, and what is wrong in them is told with its place."""

import json
from pathlib import Path
from typing import Any

import pytest

from rootlace.evaluation.questions import Question, read_questions
from rootlace.evaluation.task import fill, read_task, ready_task
from rootlace.wire.errors import InvalidRequest

ROWS = [{"question": f"{i}?", "choices": ["x", "y"], "answer": i % 2} for i in range(6)]


def write(folder: Path, task: str, rows: list[Any] | None = None) -> Path:
    lines = "".join(f"{json.dumps(row)}\n" for row in (ROWS if rows is None else rows))
    (folder / "rows.jsonl").write_text(lines)
    path = folder / "task.yaml"
    path.write_text(task)
    return path


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("data: rows.jsonl\nshots:\n  count: many\n", ":3: shots.count: Expected `int`"),
        ("data: rows.jsonl\nshots:\n  cuont: 2\n", ":3: shots.cuont: there is no such key; did"),
        (
            "data: rows.jsonl\nmetrics: [acc, accuracy]\n",
            ":2: metrics.1: Invalid enum value 'accuracy'; there are 'acc', 'acc_bytes', ",
        ),
        (
            "data: rows.jsonl\nextract: {x: {pattern: x, take: all}}\n",
            ":2: extract.take: Invalid enum value 'all'; there are 'first', 'last'",
        ),
        ("data: rows.jsonl\nname: a\nname: b\n", ":3: name: given twice"),
        ("data: rows.jsonl\nprompt: [", "task.yaml:2: expected the node content"),
        ("prompt: x\n", "task.yaml: data: is missing"),
        ("- data\n", ":1: a task is a mapping"),
        ("data: rows.jsonl\nformat: mlmu\n", ":2: format: one of questions, mmlu"),
        ("data: none.jsonl\n", "there is no file"),
        ("data: rows.jsonl\nscore: judge\n", "judge: score: judge needs it"),
        ("data: rows.jsonl\nextract: {n: {pattern: '('}}\n", ":2: extract.n.pattern: no pattern"),
        ("data: rows.jsonl\ngenerate: {max_token: 5}\n", ":2: generate: .* did you mean 'max_tok"),
        ("data: rows.jsonl\nshots: {rows: [9]}\n", "shots.rows: no row 9: the last is 5"),
        ("data: rows.jsonl\nshots: {count: 7}\n", "7 examples cannot be taken from 6 rows, "),
        ("data: rows.jsonl\nprompt: '{query}'\n", "rows.jsonl:1: no 'query'; there are: question"),
        ("data: rows.jsonl\nprompt: 'Q {question'\n", "rows.jsonl:1: the brace of .question is"),
        ("data: rows.jsonl\nprompt: '{choices[2]}'\n", r"rows.jsonl:1: .* there is no '2'"),
        ("data: rows.jsonl\nanswer: question\n", "rows.jsonl:1: question: '0\\?' is none of the 2"),
        ("data: rows.jsonl\nchoices: answer\n", "rows.jsonl:1: answer: not a list of choices"),
        ("data: rows.jsonl\nformat: [arc]\n", ":2: format: one of questions, mmlu"),
        ("data: rows.jsonl\nextract: {yes: {pattern: a}}\n", ":2: extract: a key: Expected `str`"),
        ("data: rows.jsonl\nname: 2020-13-45\n", "task.yaml: cannot be read: month must be"),
        ("data: rows.jsonl\nmetrics: []\n", ":2: metrics: Expected `array` of length >= 1"),
        ("data: rows.jsonl\nscore: generate\ngenerate:\n  n: 3\n", ":4: generate.n: a row has one"),
        ("data: rows.jsonl\nvotes: 3\n", ":2: votes: the model writes nothing"),
        ("data: rows.jsonl\ngenerate: {stop: x}\n", ":2: generate: the model writes nothing"),
        ("data: rows.jsonl\nshots: {text: none}\n", "shots.text: .*none: .*No such file"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(task: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_questions(read_task(write(tmp_path, task)))


@pytest.mark.parametrize(
    ("format", "row", "said"),
    [
        ("hellaswag", {"ctx": "a", "activity_label": "b"}, "no 'endings'"),
        ("arc", {"question": "q", "choices": ["a"]}, "choices: not an object"),
        ("arc", {"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"},
         "answerKey: 'B' is none of"),
        ("winogrande", {"sentence": "no blank", "option1": "a", "option2": "b"}, "no _ in it"),
        ("winogrande", {"sentence": "a _", "option1": "a", "option2": "b"}, "answer: '1' or '2'"),
        ("piqa", {"goal": "g", "sol1": 5}, "sol1: not a text, but 5"),
        ("boolq", {"question": "q", "label": "0"}, "label: true or false, 1 or 0, not '0'"),
        ("boolq", {"question": "q", "label": -1}, "label: true or false, 1 or 0, not -1"),
    ],
)  # fmt: skip
def test_rows_of_formats_that_do_not_fit(
    format: str, row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write(tmp_path, "", [row])
    task = ready_task(format, {"data": str(tmp_path / "rows.jsonl")})
    with pytest.raises(InvalidRequest, match=rf"rows.jsonl:1: .*{said}"):
        read_questions(task)


def test_lines_that_are_no_objects(tmp_path: Path) -> None:
    path = write(tmp_path, "data: rows.jsonl\n")
    for line, said in (("[1]", "a row is an object"), ('{"a": ', "truncated")):
        (tmp_path / "rows.jsonl").write_text(f"\n{line}\n")
        with pytest.raises(InvalidRequest, match=rf"rows.jsonl:2: .*{said}"):
            read_questions(read_task(path))


def asked(tmp_path: Path, shots: str, rows: list[Any] | None = None) -> list[Question]:
    task = "data: rows.jsonl\nprompt: 'Q: {question}'\ndescription: 'Go.'\nshots: " + shots
    return read_questions(read_task(write(tmp_path, task, rows)))


def test_examples_stand_before_the_questions_and_are_not_asked(tmp_path: Path) -> None:
    first = asked(tmp_path, "{count: 2, separator: '|'}")
    assert {question.before for question in first} == {"Go.Q: 0? x|Q: 1? y|"}
    assert [question.prompt for question in first] == [f"Q: {i}?" for i in range(2, 6)]
    assert [question.id for question in first] == [f"rows.jsonl:{i}" for i in range(3, 7)]
    drawn, again, other = (asked(tmp_path, f"{{count: 3, seed: {seed}}}") for seed in (1, 1, 2))
    assert drawn == again and drawn[0].before != other[0].before and len(drawn) == 3
    assert asked(tmp_path, "{count: 2, separator: '|', data: rows.jsonl}") == first
    fixed = asked(tmp_path, "{rows: [5, 0]}")
    assert fixed[0].before == "Go.Q: 5? y\n\nQ: 0? x\n\n" and len(fixed) == 4
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InvalidRequest, match=r"no rows in .*empty\.jsonl"):
        asked(tmp_path, "{count: 1, data: empty.jsonl}")
    (tmp_path / "before.txt").write_text("Before. ")
    assert asked(tmp_path, "{text: before.txt}")[5].before == "Go.Before. "


def test_examples_of_the_same_kind(tmp_path: Path) -> None:
    rows = [{**row, "kind": "ab"[i % 2]} for i, row in enumerate(ROWS)]
    found = asked(tmp_path, "{count: 1, same: kind}", rows)
    assert [(one.prompt[3], one.before[6]) for one in found] == [*zip("2345", "0101", strict=True)]
    with pytest.raises(InvalidRequest, match=r"rows\.jsonl:1: no 'sort'"):
        asked(tmp_path, "{count: 1, same: sort}", rows)


def test_right_answers_by_number_text_and_letter(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "answer": answer} for answer in (1, "1", "y", "B", "b")]
    assert [question.answer for question in asked(tmp_path, "{}", rows)] == [1] * 5
    with pytest.raises(InvalidRequest, match="True does not say which"):  # of "yes" and "no", say
        asked(tmp_path, "{}", [{**ROWS[0], "answer": True}])
    for wrong in (2, -1, "C", "z", None):
        with pytest.raises(InvalidRequest, match="is none of the 2 choices"):
            asked(tmp_path, "{}", [{**ROWS[0], "answer": wrong}])


def test_templates() -> None:
    fields = {"a": "A", "list": [1, {"k": "v"}]}
    text = r"{a}{list[0]}{list[1][k]} {{a}} {\n} {} { a } {{x}"
    assert fill(text, fields | {"x": 5}) == r"A1v {a} {\n} {} { a } {5"
    for missing in ("{b}", "{list[2]}", "{list[k]}", "{a[0][0]}{list[1][x]}"):
        with pytest.raises(InvalidRequest, match="no '"):
            fill(missing, fields)
    for unclosed in ("{a", "Q: {a\n}", "{a {list[0]}", "{list[0 {a}", "{{a"):
        with pytest.raises(InvalidRequest, match=r"the brace of \{(a|list) is not closed"):
            fill(unclosed, fields)
    for text in (
        '{"a": 1}',
        "{a: 1, b: {}}",
        "{\n  a: 1\n}",
        "{b",
        "{a: [\n]}",
        "x{ a",
        "{a | {b: 1}}",
    ):
        assert fill(text, fields) == text
