"""What a format is: the interface of all of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from rootlace.runtime.gateway.formats.deltas import Delta
from rootlace.wire.protocol import Thoughts
from rootlace.wire.tool_calls import Around


class Parser(Protocol):
    """Takes an answer as it is written.

    What comes out does not depend on where the pieces of text end. Nothing that the model wrote is
    lost: what looks like a call and is none is content. The work grows with
    the text's length, not with its square.
    """

    def feed(self, text: str) -> list[Delta]:
        """What is decided now."""
        ...

    def finish(self) -> list[Delta]:
        """What is left when the answer has ended."""
        ...


class Format(Protocol):
    """How one family of models writes its answers."""

    @property
    def trigger(self) -> str:
        """What every call begins with."""
        ...

    @property
    def bare(self) -> bool:
        """Whether a call may stand at an answer's beginning without a tag, as an object that may
        as well be text."""
        ...

    @property
    def end(self) -> str:
        """What stands behind a call's arguments."""
        ...

    @property
    def around(self) -> Around:
        """How calls stand together."""
        ...

    @property
    def always(self) -> bool:
        """Whether answers are to be parsed even if nobody offers a tool: they may have thoughts."""
        ...

    def parser(self, prompt_end: str, tools: Collection[str], reasoning: bool) -> Parser:
        """A parser of an answer that follows `prompt_end`.

        `tools` are the names of those that were offered. Calls are not looked for where there are
        none, nor thoughts without `reasoning`: then they are content.
        """
        ...

    def begin(self, name: str) -> str:
        """What a call of the tool `name` begins with, up to its arguments."""
        ...

    def begin_alone(self, name: str) -> tuple[str, str] | None:
        """What else begins a call of the tool `name`, without what is around calls that stand
        together: a tag, and all up to the arguments. None where nothing else does."""
        ...

    def leave_thoughts(self, prompt_end: str) -> str:
        """What ends thoughts that the prompt begins; empty where it begins none."""
        ...

    def thoughts(self, prompt_end: str) -> Thoughts | None:
        """Those that may come behind the prompt. None where none come."""
        ...

    def no_thoughts(self) -> str:
        """What a model is shown that is not to think where it may; empty where nothing says so."""
        ...

    def answer_prefix(self, prompt_end: str) -> str:
        """What leads from the prompt to the place where text for the user stands."""
        ...
