"""Batches that continue from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import pytest

import rootlace as rl
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidConstraint, InvalidRequest
from tests.frontend.fake_server import FakeServer

pytestmark = pytest.mark.usefixtures("backend")


@dataclass
class Answer:
    x: int


@rl.function
def program(s, question):
    s += "Q: " + question + rl.gen("text") + rl.gen("answer", type=Answer)
    return question


@rl.function
async def program_async(s, question):
    s += "Q: " + question + rl.gen("text") + rl.gen("answer", type=Answer)
    return question


ROWS = [{"question": str(i)} for i in range(6)]


@pytest.fixture
def broken(server: FakeServer) -> set[str]:
    """the questions that fail"""
    found: set[str] = set()

    def script(text: str, op: protocol.Generate) -> str:
        if any(f"Q: {question}" in text for question in found):
            raise InvalidConstraint("no")
        return '{"x": 1}' if op.name == "answer" else text.upper()

    server.script = script
    return found


def asked(server: FakeServer) -> int:
    return sum(op.name == "text" for op in server.sent(protocol.Generate))


def test_rows_that_are_done_are_not_run_again(
    server: FakeServer, broken: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    broken |= {"2", "4"}
    first = program.run_batch(ROWS, checkpoint=path)
    assert [state.error() is None for state in first] == [True, True, False, True, False, True]
    assert (asked(server), path.read_bytes().count(b"\n")) == (6, 4)
    broken.clear()
    changed = [*ROWS[:5], {"question": "new"}]
    types = {"answer": Answer}
    again = program.run_batch(changed, checkpoint=rl.Checkpoint(path, types=types))
    assert asked(server) == 6 + 3  # the failed rows, and the changed rows
    assert [state.ret_value for state in again] == ["0", "1", "2", "3", "4", "new"]
    assert again[0].text() == first[0].text() and again[0]["text"] == first[0]["text"]
    assert {type(state["answer"]) for state in again} == {Answer}
    assert program.run_batch(changed, checkpoint=path)[0]["answer"] == {"x": 1}
    assert asked(server) == 9


def test_a_line_that_was_cut_off_is_run_again(
    server: FakeServer, broken: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    program.run_batch(ROWS[:3], checkpoint=path)
    path.write_bytes(path.read_bytes()[:-20])
    states = program.run_batch(ROWS, checkpoint=path, generator_style=True)
    assert [state.ret_value for state in states] == list("012345")
    assert asked(server) == 3 + 4
    program.run_batch(ROWS, checkpoint=path)
    assert asked(server) == 7


def test_states_of_another_program_or_that_cannot_be_read_are_not_taken(
    server: FakeServer, broken: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    program.run_batch(ROWS[:2], checkpoint=path)
    path.write_bytes(path.read_bytes().replace(b'"rootlace":1', b'"rootlace":99', 1))
    program.run_batch(ROWS[:2], checkpoint=path)
    assert asked(server) == 3

    @rl.function
    def other(s, question):
        s += question + rl.gen("text")

    other.run_batch(ROWS[:2], checkpoint=path)
    assert asked(server) == 5


async def test_async_batches(server: FakeServer, broken: set[str], tmp_path: Path) -> None:
    path = str(tmp_path / "rows.jsonl")
    await program_async.run_batch_async(ROWS[:4], checkpoint=path)
    states = await program_async.run_batch_async(ROWS, checkpoint=path)
    assert [state.ret_value for state in states] == list("012345")
    assert asked(server) == 6


def test_other_options_are_other_rows(server: FakeServer, broken: set[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    given: list[dict[str, Any]] = [
        {},
        {"temperature": 0.5},
        {"adapter": None, "logit_bias": {3: 1.0}},
        {"regex": "[0-9]+"},
        {"tools": rl.tools(look_up)},
    ]
    for count, options in enumerate(given, 1):
        plain.run_batch(ROWS[:1], checkpoint=path, **options)
        plain.run_batch(ROWS[:1], checkpoint=path, timeout=60, **options)  # names no other text
        assert asked(server) == count
    for word in ("one", "other"):
        plain.bind(question=word).run_batch([{}], checkpoint=path)
    assert asked(server) == len(given) + 2


def look_up(word: str) -> str:
    return word


@rl.function
def plain(s, question):
    s += question + rl.gen("text")
    return {"asked": question}


def test_only_what_was_returned_is_kept(
    server: FakeServer, broken: set[str], tmp_path: Path
) -> None:
    kept = rl.Checkpoint(tmp_path / "rows.jsonl", keep="value")
    plain.run_batch(ROWS[:2], checkpoint=kept)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == [0, 1]
    assert {line["value"]["asked"] for line in lines} == {"0", "1"}
    assert all(line.keys() == {"row", "key", "value"} for line in lines)
    states = plain.run_batch(ROWS[:3], checkpoint=kept)
    assert asked(server) == 3 and [state.ret_value["asked"] for state in states] == list("012")
    assert states[0].text() == "" and not states[0].keys()
    plain.run_batch(ROWS[:2], checkpoint=kept.path)  # the checkpoint has no states
    assert asked(server) == 5
    with pytest.raises(InvalidRequest, match="'state' or 'value', not 'text'"):
        rl.Checkpoint("x", keep="text")  # type: ignore[arg-type]


@dataclass
class Guide:
    city: str

    @rl.function
    def tell(self, s):
        s += self.city + rl.gen("text")
        return self.city


def test_a_row_is_that_of_its_object(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for city in ("Rome", "Paris", "Rome"):
        (state,) = Guide(city).tell.run_batch([{}], checkpoint=path)
        assert state.ret_value == city
    assert asked(server) == 2


class Place(pydantic.BaseModel):
    at: Path


@pytest.mark.parametrize("keep", ["state", "value"])
def test_models_and_paths_are_kept(server: FakeServer, tmp_path: Path, keep: Any) -> None:
    @rl.function
    def visit(s, place, asked):
        s["place"] = place
        s += str(asked) + rl.gen("text")
        return [place]

    rows = [(Place(at=Path(name)), Path(name)) for name in "ab"]
    path = tmp_path / "rows.jsonl"
    first = visit.run_batch(rows, checkpoint=rl.Checkpoint(path, keep=keep))
    plain = visit.run_batch(rows, checkpoint=rl.Checkpoint(path, keep=keep))
    kinds = {"return": list[Place]}
    typed = visit.run_batch(rows, checkpoint=rl.Checkpoint(path, kinds, keep))
    assert asked(server) == 2
    assert [state.ret_value for state in plain] == [[{"at": "a"}], [{"at": "b"}]]
    assert [state.ret_value for state in typed] == [state.ret_value for state in first]
    with pytest.raises(InvalidRequest, match="what the program returned is no int: "):
        rl.State.from_json(first[0].to_json(), types={"return": int})
    if keep == "state":
        assert typed[0]["place"] == {"at": "a"}


def test_what_cannot_be_kept(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"batch\[0\]: a checkpoint needs arguments"):
        program.run_batch([{"question": object()}], checkpoint=tmp_path / "x")

    @rl.function
    def odd(s, value):
        s["value"] = object() if value == 1 else value
        s += rl.gen("text")
        return "\ud800" if value == 2 else value

    for count in (4, 6):  # the two rows without a record run again
        with pytest.warns(UserWarning, match=r"batch\[[12]\] is done, but .* cannot keep it"):
            states = odd.run_batch([{"value": i} for i in range(4)], checkpoint=tmp_path / "x")
        assert [state.ret_value for state in states] == [0, 1, "\ud800", 3]
        assert asked(server) == count
