"""Vectors of texts, asked for outside of any program."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence

from rootlace.client.answer import Answer
from rootlace.client.connection import Connection
from rootlace.wire import protocol
from rootlace.wire.protocol import VectorKind

Content = str | Sequence[int]
"""A text, or the ids of its tokens."""


def ask(
    connection: Connection,
    texts: Sequence[Content],
    pooling: VectorKind | None,
    *,
    normalise: bool,
    namespace: str,
    adapter: str,
) -> Answer:
    """Send the question. Raises InvalidRequest if it cannot be sent."""
    inputs = tuple(
        protocol.Text(one) if isinstance(one, str) else protocol.Tokens(tuple(one)) for one in texts
    )
    answer = Answer()
    op = connection.next_op()
    connection.send(protocol.Embed(op, inputs, pooling, normalise, namespace, adapter), answer)
    connection.count_round_trip()
    connection.flush()
    return answer


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
