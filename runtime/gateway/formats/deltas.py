"""What an answer consists of, piece by piece as it is written, and as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
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


@dataclass
class Answer:
    """All deltas of an answer together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Answer:
        """White space around calls says nothing and is left out."""
        answer = cls()
        for delta in deltas:
            match delta:
                case Content():
                    answer.content += delta.text
                case Reasoning():
                    answer.reasoning += delta.text
                case CallBegin():
                    answer.calls.append(Call(delta.name, ""))
                case CallArguments():
                    last = answer.calls[-1]
                    answer.calls[-1] = Call(last.name, last.arguments + delta.text)
        if answer.calls:
            answer.content = answer.content.strip()
        return answer
