"""Generating once what a program will ask for, so that the runtime has what that needs."""

from __future__ import annotations

from collections.abc import Sequence

from rootlace.client.answer import Answer
from rootlace.client.channel import Channel
from rootlace.language import sampling
from rootlace.language.expressions import Expression, Gen, items
from rootlace.wire import protocol

_TOKENS = 8


def first_uses(what: Expression) -> list[Gen]:
    """Each `gen` in an expression. Raises TypeError for one without any."""
    found = [item for item in items(what) if isinstance(item, Gen)]
    if not found:
        raise TypeError("warm_up takes True or an expression with a gen(...)")
    return found


def generate_once(connection: Channel, asked: Sequence[Gen]) -> None:
    """Generate a few tokens for each. Raises the runtime's typed errors."""
    answers = [answer for each in asked for answer in _generate(connection, each)]
    connection.flush()
    for answer in answers:
        answer.get()


def _generate(connection: Channel, expression: Gen) -> list[Answer]:
    options = {"temperature": 0.0, **expression.options, "max_tokens": _TOKENS, "min_tokens": 0}
    asked = sampling.resolve({}, options)
    branch = connection.next_branch()
    answers = []
    for op in (
        protocol.Open(connection.next_op(), branch),
        protocol.Append(connection.next_op(), branch, (protocol.Text("Hello"),)),
        protocol.Generate(
            connection.next_op(), branch, params=asked.params, constraint=asked.constraint
        ),
        protocol.Close(connection.next_op(), branch),
    ):
        answers.append(Answer())
        connection.send(op, answers[-1])
    return answers
