"""Large bodies: other requests are answered meanwhile, and memory for bodies is bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.server.http import body
from rootlace.runtime.server.http.body import CONTAINER, Body, weight_beyond
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.wire.errors import InvalidRequest
from tests.server.http.conftest import Served
from tests.waiting import eventually, until


async def test_others_are_answered_while_a_large_body_is_decoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, answered = threading.Event(), threading.Event()
    decode = body.decode_body

    def decode_late(raw: Any, kind: Any) -> Any:
        if len(raw) > body.LARGE_BYTES:
            begun.set()
            eventually(answered.is_set)
        return decode(raw, kind)

    monkeypatch.setattr(body, "decode_body", decode_late)
    large = {"prompt": "a" * body.LARGE_BYTES, "max_tokens": 1}
    waiting = asyncio.ensure_future(served.http.post("/v1/completions", json=large))
    await until(begun.is_set)
    assert (await served.post("/v1/completions", {"prompt": "b"})).status == 200
    answered.set()
    async with await waiting as reply:
        assert reply.status == 200


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_named(encoding: str) -> None:
    with pytest.raises(InvalidRequest, match="begins with a byte order mark; send UTF-8"):
        body.decode_body('{"value": 1}'.encode(encoding), _Anything)


class _Anything(msgspec.Struct):
    value: Any


def _weight(value: Any) -> int:
    """Weigh a decoded body by the documented rule."""
    if isinstance(value, str):
        return 1
    if not isinstance(value, dict | list):
        return 0
    members = len(value) * (CONTAINER + 1) if isinstance(value, dict) else 0
    parts = value.values() if isinstance(value, dict) else value
    return max(len(value) - 1, 0) + CONTAINER + members + sum(map(_weight, parts))


_TEXT = st.text(st.sampled_from('a,[{}]\\":'), max_size=6)
_VALUE = st.recursive(
    st.one_of(st.integers(), _TEXT, st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(_TEXT, inner, max_size=5)),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(_VALUE, st.integers(0, 120))
def test_values_weigh_what_they_do_wherever_they_are(value: Any, most: int) -> None:
    raw = json.dumps({"value": value}).encode()
    weight = _weight({"value": value})
    assert weight_beyond(raw, weight - 1) and not weight_beyond(raw, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "LARGE_BYTES", 0)
        patch.setattr(body, "MAX_WEIGHT", most)
        if weight <= most:
            assert body.decode_body(raw, _Anything).value == value
            return
        with pytest.raises(InvalidRequest, match=f"more than {most} values"):
            body.decode_body(raw, _Anything)


async def test_a_body_of_many_small_things_is_refused_before_they_are_made(served: Served) -> None:
    raw = b'{"prompt":[' + b",".join([b"[]"] * 100_000) + b"]}"
    async with served.http.post(
        "/v1/completions", data=raw, headers={"Content-Type": "application/json"}
    ) as reply:
        assert reply.status == 400 and "holds more than" in await reply.text()


class _Prompt(Body):
    prompt: list[int | str | list[int]]
    seed: int | None = None


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"prompt":[1],"seed":1e400}', "seed"),
        ('{"prompt":["a",1e400]}', r"prompt\[1\]"),
        ('{"prompt":[1,' + "9" * 5000 + "]}", r"prompt\[1\]"),
        ('{"prompt":' + "[" * 5000 + "]" * 5000 + "}", r"prompt\[0\]\[0\]"),
    ],
)
def test_a_number_or_list_beyond_all_bounds_is_named(text: str, param: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{param}: "):
        body.decode_body(text.encode(), _Prompt)


def test_mending_costs_python_calls_for_containers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    mended_value = body._mended_value

    def counted(*args: Any) -> msgspec.Raw:
        calls.append(args)
        return mended_value(*args)

    monkeypatch.setattr(body, "_mended_value", counted)
    raw = b'{"prompt":[[1.0],"[",' + b"0," * 1000 + b"2.0]}"
    found = body.decode_body(raw, _Prompt)
    assert found == _Prompt([[1], "[", *[0] * 1000, 2])
    assert len(calls) < 10
