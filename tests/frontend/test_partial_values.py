"""Values that are not yet complete."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rootlace as rl
from rootlace.types.partial_json import Unfinished, parse_beginning
from tests.frontend.fake_server import FakeServer

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


def begins(part: Any, whole: Any) -> bool:
    """Whether `part` may be known of `whole`."""
    if isinstance(whole, str) and isinstance(part, str):
        return whole.startswith(part)
    if isinstance(whole, list) and isinstance(part, list):
        return len(part) <= len(whole) and all(map(begins, part, whole))
    if isinstance(whole, dict) and isinstance(part, dict):
        keys = list(whole)[: len(part)]
        return list(part) == keys and all(begins(part[key], whole[key]) for key in keys)
    return part == whole


@settings(max_examples=40)
@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_each_beginning_of_a_text_says_a_beginning_of_its_value(value, ascii, indent) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    for end in range(len(text)):
        try:
            assert begins(parse_beginning(text[:end]), value)
        except Unfinished:
            assert end == 0 or not text.startswith(("{", "[", '"'))
    assert parse_beginning(text + " ") == value


def test_what_is_known_when() -> None:
    text = '{"name": "Id\\u00e9", "age": 47, "tags": ["a", true]}'
    seen = []
    for end in range(1, len(text) + 1):
        value = parse_beginning(text[:end])
        if value not in seen:
            seen.append(value)
    assert seen[:5] == [{}, {"name": ""}, {"name": "I"}, {"name": "Id"}, {"name": "Idé"}]
    assert {"name": "Idé", "age": 4} not in seen
    assert seen[-1] == json.loads(text)


@pytest.mark.parametrize("text", ["?", "{1", '{"a" 1', "[1 2", '{"a": 1 "b"', '"\\x"', "nul,"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_beginning(text)


@dataclass
class Person:
    name: str
    age: int


@pytest.mark.usefixtures("backend")
async def test_a_typed_value_streams(server: FakeServer) -> None:
    server.script = lambda text, op: '{"name": "Ida Lund", "age": 47}'

    @rl.function
    def extract(s):
        s += "x" + rl.gen("person", type=Person)

    seen = list(extract.run(stream=True).value_iter("person"))
    assert seen[0] == {} and {"name": "Ida L"} in seen and seen[-1] == Person("Ida Lund", 47)
    assert len(seen) > 4
    assert list(extract.run().value_iter("person"))[-1] == seen[-1]
    state = extract.run(stream=True)
    assert [value async for value in state.value_async_iter("person")] == seen
