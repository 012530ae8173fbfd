"""Random wrong bodies and frames: each gets an answer, and the server continues.

`pytest --hypothesis-profile random tests/server/test_fuzz.py` tries hundreds of new ones.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import aiohttp
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.protocol import Append, Done, Failed, Generate, Generated, Open, Ping, Text
from tests.conftest import ROOT
from tests.server.conftest import served
from tests.server.test_server import Peer, World, world

EXAMPLES = settings(max_examples=12 if settings().derandomize else 400)

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["\x00", "\ud7ff", "self", "$ref", "a" * 5000, -1, 2**31, 1e308, "text"])
)
JUNK = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stop": ["b"], "logit_bias": {"5": 1}}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2, "tools": [TOOL], "n": 1}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2, "chat_template_kwargs": {"a": 1}}),
    ("/v1/responses", {"input": ASK, "max_output_tokens": 2, "text": {"format": {"type": "text"}}}),
    ("/v1/messages", {"messages": ASK, "max_tokens": 2, "system": "x"}),
    ("/v1/embeddings", {"input": ["a"], "encoding_format": "float"}),
    ("/v1/score", {"query": "a", "items": ["b"], "labels": ["c"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/api/chat", {"model": "model", "messages": ASK, "options": {"num_predict": 2}}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}, "rid": "r"}),
    ("/select", {"text": "a", "choices": ["b", "c"]}),
    ("/tokenize", {"messages": ASK, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/abort", {"rid": "r"}),
]
OPERATIONS: list[dict[str, Any]] = [
    {"type": "hello", "op": 1, "version": 1},
    {"type": "open", "op": 1, "branch": 1, "program": "p"},
    {"type": "append", "op": 2, "branch": 1, "parts": [{"type": "text", "text": "a"}]},
    {"type": "append", "op": 2, "branch": 1, "parts": [{"type": "tokens", "ids": [5]}]},
    {"type": "prefill", "op": 3, "branch": 1},
    {"type": "generate", "op": 4, "branch": 1, "params": {"max_tokens": 2}, "stream": True},
    {"type": "select", "op": 5, "branch": 1, "choices": ["a", "b"]},
    {"type": "explain", "op": 6, "branch": 1},
    {"type": "embed", "op": 7, "inputs": [{"type": "text", "text": "a"}]},
    {"type": "cancel", "op": 8, "branch": 1},
    {"type": "close", "op": 9, "branch": 1},
    {"type": "unpin", "op": 10, "pin": "x"},
    {"type": "status", "op": 11},
]


@st.composite
def spoilt(draw: st.DrawFn, valid: Any) -> Any:
    """Draw `valid` with one value, at any depth, changed, left out, or joined by another."""
    whole = copy.deepcopy(valid)
    at = whole
    while True:
        key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not (isinstance(at[key], dict | list) and at[key] and draw(st.booleans())):
            break
        at = at[key]
    match draw(st.sampled_from(["change", "change", "drop", "add"])):
        case "change":
            at[key] = draw(JUNK)
        case "drop":
            del at[key]
        case "add" if isinstance(at, dict):
            at[draw(st.text(max_size=6))] = draw(JUNK)
    return whole


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    path, body = draw(st.sampled_from(BODIES))
    whole = draw(spoilt(body) | JUNK)
    raw = msgspec.json.encode(whole)
    return path, draw(
        st.sampled_from([raw, raw, raw, raw[: len(raw) // 2]]) | st.binary(max_size=9)
    )


FRAMES = st.lists(st.sampled_from(OPERATIONS).flatmap(spoilt) | JUNK, max_size=5).map(
    msgspec.msgpack.encode
) | st.binary(max_size=12)


def test_bodies(stories: Tokenizer) -> None:
    async def send(http: aiohttp.ClientSession, path: str, body: bytes) -> None:
        async with http.post(path, data=body) as reply:
            said = await reply.read()
            assert reply.status < 500, said
            assert b"Traceback" not in said and str(ROOT).encode() not in said
            if reply.content_type == "application/json":
                assert reply.status == 200 or msgspec.json.decode(said)["error"]
        good = {"prompt": "a", "max_tokens": 2}
        async with http.post("/v1/completions", json=good) as reply:
            assert reply.status == 200

    with asyncio.Runner() as runner:
        context = served(stories)
        http = runner.run(context.__aenter__())

        @EXAMPLES
        @given(requests())
        def fuzz(asked: tuple[str, bytes]) -> None:
            runner.run(send(http, *asked))

        try:
            fuzz()
        finally:
            runner.run(context.__aexit__(None, None, None))


def test_frames(stories: Tokenizer) -> None:
    async def send(here: World, good: Peer, frame: bytes, number: int) -> None:
        bad = await here.ready()
        await bad.raw(frame)
        await bad.send(Ping(2**40))
        # A goodbye makes the client unknown; the server says so.
        await bad.until(lambda e: e == Done(2**40) or (e.op == 0 and isinstance(e, Failed)))
        bad.socket.close()
        here.peers.remove(bad)
        ops = (Open(number, number), Append(number + 1, number, (Text("a"),)))
        await good.send(*ops, Generate(number + 2, number))
        assert isinstance(await good.terminal(number + 2), Generated)

    with asyncio.Runner() as runner:
        context = world(stories)
        here = runner.run(context.__aenter__())
        good = runner.run(here.ready())
        numbers = iter(range(1, 10**6, 3))

        @EXAMPLES
        @given(FRAMES)
        def fuzz(frame: bytes) -> None:
            runner.run(send(here, good, frame, next(numbers)))

        try:
            fuzz()
        finally:
            runner.run(context.__aexit__(None, None, None))
