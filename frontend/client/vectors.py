"""Vectors of texts, asked for outside of any program."""

from __future__ import annotations

import array
import operator
import sys
from collections.abc import Sequence

from rootlace.client.answer import Answer
from rootlace.client.channel import Channel
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import VectorKind

Content = str | Sequence[int]
"""A text, or the ids of its tokens."""


def ask(
    connection: Channel,
    texts: Sequence[Content],
    pooling: VectorKind | None,
    *,
    normalise: bool,
    namespace: str,
    adapter: str,
) -> Answer:
    """Send the question. Scores of labels are as they are, whatever `normalise` says. Raises
    InvalidRequest if it cannot be sent."""
    if isinstance(texts, str):
        raise InvalidRequest("texts is a single text, not a list of them")
    inputs = tuple(_input(one, index) for index, one in enumerate(texts))
    normalise = normalise and pooling != "labels"
    answer = Answer()
    op = connection.next_op()
    connection.send(protocol.Embed(op, inputs, pooling, normalise, namespace, adapter), answer)
    connection.count_round_trip()
    connection.flush()
    return answer


def _input(content: Content, index: int) -> protocol.Text | protocol.Tokens:
    if isinstance(content, str):
        return protocol.Text(content)
    try:
        if not isinstance(content, bytes):
            return protocol.Tokens(tuple(map(operator.index, content)))
    except TypeError:
        pass
    raise InvalidRequest(f"texts[{index}] is neither a text nor a list of token ids: {content!r}")


def vectors_of(event: protocol.Event) -> list[list[float]]:
    """Those that the answer has."""
    assert isinstance(event, protocol.Embedded)
    found = []
    for data in event.vectors:
        numbers = array.array("f", data)
        if sys.byteorder == "big":
            numbers.byteswap()
        found.append(numbers.tolist())
    return found
