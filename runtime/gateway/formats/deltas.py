"""What an answer consists of, piece by piece as it is written, and as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Text that the model wrote to itself."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins; what follows until the next one are its arguments."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Delta = Content | Reasoning | CallBegin | CallArguments


@dataclass(frozen=True)
class Call:
    """A whole call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """All deltas of an answer together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    deltas: tuple[Delta, ...] = field(default=(), compare=False)
    """What it was made of, in order."""

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Answer:
        """White space around calls says nothing and is left out."""
        deltas = tuple(deltas)
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        calls: list[tuple[str, list[str]]] = []
        for delta in deltas:
            if isinstance(delta, CallBegin):
                calls.append((delta.name, []))
            elif isinstance(delta, CallArguments):
                calls[-1][1].append(delta.text)
        return cls(
            content.strip() if calls else content,
            reasoning,
            [Call(name, "".join(arguments)) for name, arguments in calls],
            deltas,
        )
