"""Splitting text into content and tool calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootlace.runtime.gateway.http.tool_calls import ToolCall, ToolCallParser, split_tool_calls

CALL = '<tool_call>{"name":"f","arguments":{"x":1e3}}</tool_call>'
FOUND = ToolCall("f", '{"x":1e3}')


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("plain <b> text", "plain <b> text", []),
        (CALL, "", [FOUND]),
        (f"a {CALL}\n{CALL} b", "a \n b", [FOUND, FOUND]),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ('<tool_call>{"name":3}</tool_call>', '<tool_call>{"name":3}</tool_call>', []),
        ('<tool_call>{"name":"f","arguments":{"x":1e3}}', "", [FOUND]),  # stopped at its tag
        ('<tool_call>{"name":"f"', '<tool_call>{"name":"f"', []),
        ('<tool_call>{"name":"f","arguments":"{\\"x\\":1e3}"}</tool_call>', "", [FOUND]),
        ('<tool_call>{"name":"f"}</tool_call>', "", [ToolCall("f", "{}")]),
        ("ends in <tool_", "ends in <tool_", []),
    ],
)
def test_split(text: str, content: str, calls: list[ToolCall]) -> None:
    assert split_tool_calls(text) == (content, calls)


PIECES = st.sampled_from(["a", "<", "<tool", CALL, "<tool_call>", "</tool_call>", "{}", "\n", "é"])


@given(st.lists(PIECES, max_size=12).map("".join), st.data())
def test_any_chunking_gives_the_same(text: str, data: st.DataObject) -> None:
    parser, pieces, rest = ToolCallParser(), [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces += parser.feed(rest[:size])
        rest = rest[size:]
    pieces += parser.finish()
    whole = ToolCallParser()
    expected = whole.feed(text) + whole.finish()
    assert _merged(pieces) == _merged(expected)


def _merged(pieces: list[str | ToolCall]) -> list[str | ToolCall]:
    merged: list[str | ToolCall] = []
    for piece in pieces:
        if merged and isinstance(piece, str) and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged
