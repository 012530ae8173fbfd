"""Runs: what is asked, what is kept, what goes on; against a backend that says what it is told."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rootlace.evaluation.questions import (
    METRICS,
    RESAMPLES,
    Scored,
    chosen,
    estimate,
    extracted,
    sign_test,
)
from rootlace.evaluation.report import compare, page
from rootlace.evaluation.run import Record, Results, evaluate, read_results
from rootlace.evaluation.task import Extract, Task, read_task
from rootlace.testing import Scripted
from rootlace.wire.errors import InvalidRequest
from tests.evaluation.test_tasks import write

SUMS = [{"question": f"{i}+1", "choices": [str(i), str(i + 1)], "answer": 1} for i in range(6)]


def task(folder: Path, more: str = "", rows: list[Any] | None = None) -> Task:
    text = f"data: rows.jsonl\nprompt: 'Q: {{question}}'\n{more}"
    return read_task(write(folder, text, SUMS if rows is None else rows))


def rightly(prompt: str) -> str:
    """What follows `3+1` is 4."""
    return f" {int(prompt[-3]) + 1}"


def test_choices_are_scored_and_kept(tmp_path: Path) -> None:
    told: list[tuple[bool, int]] = []
    backend = Scripted({r"[12]\+1$": lambda prompt: f" {prompt[-3]}"}, default=rightly)
    run = evaluate(
        task(tmp_path, "shots: {count: 1}"),
        backend,
        tmp_path / "run",
        concurrency=1,
        told=lambda record, total: told.append((record is not None, total)),
    )
    assert [record.scores["acc"] for record in run.records] == [0, 0, 1, 1, 1]
    assert told == [(True, 5)] * 5
    assert backend.calls[0].prompt == "Q: 0+1 1\n\nQ: 1+1" and backend.open_branches == 0
    assert 0 < run.cached_tokens < run.prompt_tokens == sum(r.prompt_tokens for r in run.records)
    lines = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["value"]["choices"] == ["1", "2"]
    again = read_results(tmp_path / "run")
    assert again == run and again.estimates() == run.estimates()


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, asked = tmp_path / "run", task(tmp_path)
    backend = Scripted({r"4\+1": RuntimeError("broken")}, default=rightly)
    first = evaluate(asked, backend, folder)
    assert [id for id, _ in first.failures] == ["rows.jsonl:5"] and len(first.records) == 5
    assert "select('likeliest'): RuntimeError: broken" in first.failures[0][1]
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:3])[:-9])  # cut off in a line
    count = len(backend.calls)
    second = evaluate(asked, backend, folder)
    assert second.asked == 4 == len(backend.calls) - count + 1 and len(second.records) == 5
    assert read_results(folder) == second
    with pytest.raises(InvalidRequest, match="differs in the rows of its data, which have changed"):
        evaluate(task(tmp_path, rows=SUMS[:2]), backend, folder)
    task(tmp_path)  # the rows as they were
    with pytest.raises(InvalidRequest, match=r"differs in model\.path \(.+ there, .+ now\): give"):
        evaluate(asked, Scripted(default=rightly), folder)
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1]))
    with pytest.raises(InvalidRequest, match="holds 4 of 5 rows"):
        read_results(folder)
    (folder / "run.json").unlink()
    with pytest.raises(InvalidRequest, match=r"rows without run\.json"):
        evaluate(asked, backend, folder)


@pytest.mark.parametrize("limits", [(2, 4), (4, 2), (None, 2), (2, None)])
def test_a_run_goes_on_with_another_limit(
    limits: tuple[int | None, int | None], tmp_path: Path
) -> None:
    backend, folder = Scripted(default=rightly), tmp_path / "run"
    before, after = (task(tmp_path, f"limit: {n}" if n else "") for n in limits)
    first, second = evaluate(before, backend, folder), evaluate(after, backend, folder)
    assert len(second.records) == (limits[1] or 6)
    assert second.asked == max(0, len(second.records) - len(first.records))
    assert len(backend.calls) == max(len(first.records), len(second.records))
    assert read_results(folder) == second


def test_a_run_goes_on_where_its_files_were_moved(tmp_path: Path) -> None:
    backend = Scripted(default=rightly)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    for name in ("a", "b"):
        run = evaluate(task(tmp_path / name), backend, tmp_path / "run")
    assert run.asked == 0 and len(run.records) == 6 == len(backend.calls)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("shots: {count: 2}", r"differs in shots\.count \(1 there, 2 now\): give another"),
        ("shots: {count: 1, seed: 5}", r"in shots\.seed \(null there, 5 now\): "),
        (
            "metrics: [acc_norm]",
            r'in metrics \(\["acc"\] there, \["acc_norm"\] now\), shots',
        ),
        ("shots: {count: 1}\ndelimiter: ''", r'in delimiter \(" " there, "" now\): '),
        ("description: 'Add. '\nshots: {count: 1}", r'in description \("" there, "Add. " now\): '),
    ],
)
def test_what_another_run_differs_in_is_named(more: str, said: str, tmp_path: Path) -> None:
    backend, folder = Scripted(default=rightly), tmp_path / "run"
    evaluate(task(tmp_path, "shots: {count: 1}"), backend, folder)
    with pytest.raises(InvalidRequest, match=said):
        evaluate(task(tmp_path, more), backend, folder)


def test_another_judge_is_another_run(tmp_path: Path) -> None:
    judged = task(tmp_path, "score: judge\njudge: {prompt: '{question} {response}'}")
    backend, folder = Scripted(response="2", verdict="yes"), tmp_path / "run"
    evaluate(judged, backend, folder)
    assert evaluate(judged, backend, folder).asked == 0
    with pytest.raises(InvalidRequest, match=r"differs in judge\.path"):
        evaluate(judged, backend, folder, judge=Scripted(verdict="no"))


WRITTEN = """
score: generate
answer: '{answer}'
generate: {max_tokens: 20, stop: ["Q:"]}
extract: {first: {pattern: '\\d+'}, last: {pattern: '= (\\d+)|#(\\d+)', take: last}}
match: {ignore: [',', '\\.$'], ignore_case: true}
"""


def test_what_is_written_is_extracted_and_matched(tmp_path: Path) -> None:
    rows = [{"question": "12*100", "answer": "1,200."}, {"question": "5-1", "answer": "4"}]
    said = {r"12\*100$": "12*100 = 1,2 = 1200 so #1200", r"5-1$": "none at all Q: 5"}
    backend = Scripted(said)
    run = evaluate(task(tmp_path, WRITTEN, rows), backend)
    assert [record.scores for record in run.records] == [
        {"first": 0, "last": 1},
        {"first": 0, "last": 0},
    ]
    assert run.records[0].extracted == {"first": "12", "last": "1200"}
    assert run.records[1].extracted == {"first": None, "last": None}
    assert backend.calls[0].params.temperature == 0 and backend.calls[0].params.max_tokens == 20


def test_most_votes_and_messages(tmp_path: Path) -> None:
    more = "score: generate\nchat: true\nvotes: 3\ndescription: 'Be brief. '\n"
    more += "match: {ignore: ['\\.$'], ignore_case: true}"  # the same of votes
    backend = Scripted(response=["Three", "two", "Two."])
    rows = [{"question": "1+1", "answer": "two"}]
    run = evaluate(task(tmp_path, more, rows), backend)
    assert run.records[0].response == "two" and run.estimates()["exact_match"].mean == 1
    assert backend.calls[0].prompt == "<|user|>Be brief. Q: 1+1<|end|><|assistant|>"
    # The tokens are those of all votes.
    single = []
    for said in ("Three", "two", "Two."):
        once = task(tmp_path, more.replace("votes: 3", "votes: 1"), rows)
        single.append(evaluate(once, Scripted(response=said)).records[0])
    (all_three,) = run.records
    assert all_three.prompt_tokens == sum(one.prompt_tokens for one in single) > 0
    assert all_three.completion_tokens == sum(one.completion_tokens for one in single) > 0


@pytest.mark.parametrize("chat", [False, True])
def test_responses_are_judged(chat: bool, tmp_path: Path) -> None:
    judge = "judge: {prompt: '{question} is {response}?', choices: [good, bad], right: good}"
    more = f"score: judge\n{judge}\nchat: {str(chat).lower()}"
    other = Scripted({r"1\+1 is 2\?": "good"}, default="bad")
    backend = Scripted(response="2")
    rows = [{"question": "1+1"}, {"question": "2+2"}]
    run = evaluate(task(tmp_path, more, rows), backend, judge=other)
    assert [record.scores["judged"] for record in run.records] == [1, 0]
    assert [record.verdict for record in run.records] == ["good", "bad"]
    assert other.calls[0].prompt.startswith("<|user|>") == chat


def test_what_choices_are_worth_by_themselves_is_asked_once(tmp_path: Path) -> None:
    more = "metrics: [acc_mutual_info]\nchoices: ['yes', 'no']"
    backend = Scripted({"^$": " yes"}, default=" no")
    run = evaluate(task(tmp_path, more), backend, concurrency=1)
    # Scripted choices are worth -1 where they are chosen and -2 next to that.
    assert [record.alone for record in run.records] == [[-1, -2]] * 6
    assert sum(not call.prompt for call in backend.calls) == 1
    assert [record.scores["acc_mutual_info"] for record in run.records] == [1] * 6


def test_normalisations() -> None:
    scored = [
        Scored("été", -6.0, 4, -1.0),
        Scored("no", -5.0, 2, -0.5),
        Scored("yes!", -7.0, 7, -6),
    ]
    assert {name: chosen(name, scored) for name in METRICS} == {
        "acc": 1,
        "acc_norm": 2,  # -2, -2.5, -1.75
        "acc_bytes": 0,  # -1.2, -2.5, -1.75
        "acc_tokens": 2,  # -1.5, -2.5, -1
        "acc_mutual_info": 2,
    }
    assert chosen("acc", [Scored("a", -1.0, 1), Scored("b", -1.0, 1)]) == 0
    assert extracted(" x ", None) == "x" and extracted("", Extract("a*")) == ""


def test_intervals_and_chances() -> None:
    values = [float(random.random() < 0.3) for _ in range(300)]
    found = estimate(values)
    assert found == estimate(values) and found.rows == 300
    assert found.error == pytest.approx((found.mean * (1 - found.mean) / 299) ** 0.5)
    # Of a mean of so many rows the bootstrap's interval is the normal one, nearly.
    assert found.low == pytest.approx(found.mean - 1.96 * found.error, abs=0.01)
    assert found.high == pytest.approx(found.mean + 1.96 * found.error, abs=0.01)
    assert RESAMPLES >= 1000 and estimate([1.0]).low == 1.0
    # Binomial probabilities of scipy.stats.binomtest.
    assert sign_test(0, 0) == sign_test(3, 3) == 1.0
    assert sign_test(1, 9) == pytest.approx(0.021484375)
    assert sign_test(40, 20) == pytest.approx(0.0134, abs=1e-4)


def results(scores: list[float], name: str = "m") -> Results:
    records = [
        Record(
            id=str(i), group="ab"[i % 2], prompt=f"<q{i}>", expected="<e>", scores={"<acc>": score}
        )
        for i, score in enumerate(scores)
    ]
    return Results("t", name, records, [("9", "it <failed>")], 2.0, len(scores))


def test_runs_are_compared_row_by_row() -> None:
    first, second = results([1, 1, 1, 0, 1]), results([0, 1, 0, 1, 1, 1])
    (found,) = compare(first, second)
    assert (found.better, found.worse, found.first, found.second) == (2, 1, 0.8, 0.6)
    assert found.difference.mean == pytest.approx(0.2) and found.chance == 1.0
    assert found.difference.low < 0 < found.difference.high
    for run in (first, second):
        for record in run.records:
            record.id = record.prompt = ""  # not told apart: paired in their order
    assert compare(first, second) == [found]
    second.records = [Record(id="x", prompt="", scores={"acc": 1})]
    with pytest.raises(InvalidRequest, match="no rows in common"):
        compare(first, second)


def test_a_page_needs_nothing_else() -> None:
    first, second = results([1, 0, 1]), results([0, 0, 1], "<other>")
    text = page(first, second, compare(first, second))
    assert "&lt;q1&gt;" in text and "it &lt;failed&gt;" in text and "&lt;other&gt;" in text
    assert "<q1>" not in text and "<acc>" not in text and "http" not in text and "src=" not in text
    assert text.count('class="bad"') == 1 and text.count('class="good"') == 2
    assert first.by_group().keys() == {"a", "b"}
