"""Text whose KV is computed before a program asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from rootlace.client.answer import Answer
from rootlace.client.channel import Channel
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest


def compute(
    connection: Channel,
    texts: Sequence[protocol.Text],
    program: str = "",
    adapter: str | None = None,
) -> tuple[int, list[Answer]]:
    """Open a branch and have `texts` computed in it: its id, and what is then to be waited for.

    Raises InvalidRequest, and leaves no branch, if they cannot be sent.
    """
    branch = connection.next_branch()
    answers = []
    try:
        for op in (
            protocol.Open(connection.next_op(), branch, program=program, adapter=adapter),
            protocol.Append(connection.next_op(), branch, tuple(texts)),
            protocol.Prefill(connection.next_op(), branch),
        ):
            answers.append(Answer())
            connection.send(op, answers[-1])
    except InvalidRequest:
        close(connection, branch)
        raise
    return branch, answers


def close(connection: Channel, branch: int, cancel: bool = False) -> None:
    """Give the branch back once it is computed, or at once with `cancel`; its KV stays cached."""
    if cancel:
        connection.send(protocol.Cancel(connection.next_op(), branch), Answer())
    connection.send(protocol.Close(connection.next_op(), branch), Answer())
    connection.flush()


def cache(connection: Channel, texts: Sequence[protocol.Text], adapter: str | None = None) -> None:
    """Compute `texts` and keep nothing but their KV in the cache. Waits; raises typed errors."""
    branch, answers = compute(connection, texts, adapter=adapter)
    close(connection, branch)
    for answer in answers:
        answer.get()
