"""What stands behind a state: a branch that takes what is appended, and a reader of its values.

There are two interpreters of a program. `rootlace.program` runs it: appending sends operations to
a runtime. `rootlace.trace` finds its graph: appending records nodes, and reading gives symbols.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from rootlace.language.expressions import Appendable
from rootlace.language.saved import Saved
from rootlace.language.tool_calls import Offer, ToolCall
from rootlace.language.variables import Pending, Readable
from rootlace.timeline.spans import Timeline


class Reader(Protocol):
    """Reads a branch. `wait_for` and `wait_for_async` end when all that they are given is over."""

    @property
    def streams(self) -> bool:
        """Whether text comes while it is generated."""

    def find(self, name: str) -> Readable:
        """The variable `name`. Raises UnknownVariable for a name the program has not used."""

    def pending(self) -> Iterable[Pending]:
        """What must be over before `text`, `messages` and `error` say all there is to say."""

    def wait_for(self, pending: Iterable[Pending]) -> None: ...

    async def wait_for_async(self, pending: Iterable[Pending]) -> None: ...

    def wait_for_any(self, pending: Sequence[Pending]) -> None:
        """Wait until at least one of them is over."""

    async def wait_for_any_async(self, pending: Sequence[Pending]) -> None: ...

    def text(self) -> str: ...

    def messages(self) -> list[dict[str, str]]: ...

    def error(self) -> BaseException | None: ...

    def follow(self, name: str | None) -> Iterator[str]:
        """The text of the branch, or of the variable `name`, as it is generated."""

    def follow_async(self, name: str | None, with_meta: bool) -> AsyncIterator[Any]:
        """The same on an event loop; `with_meta`: pairs of text and meta information."""


class Branch(Protocol):
    """Takes what a program appends, in order."""

    variables: dict[str, Readable]

    @property
    def reader(self) -> Reader: ...

    def append(self, expression: Appendable) -> None: ...

    def set_variable(self, name: str, value: Any) -> None: ...

    def position(self) -> int:
        """Where it stands, for `name_from`."""

    def name_from(self, position: int, name: str) -> None:
        """Make what was appended since `position` the variable `name`."""

    def fork(self, size: int, adapter: str | None = None) -> Sequence[Self]:
        """Branches that start where this one stands, with its adapter (None) or another one."""

    def take_offer(self) -> Offer | None:
        """The tools of the latest `gen` that may have called some; None once they were taken."""

    def called(self, call: ToolCall) -> None:
        """A tool was called, and has just given its result."""

    def timeline(self) -> Timeline:
        """What the whole run has done so far."""

    def mark(self) -> Self:
        """A branch that stays where this one stands."""

    def go_back(self, mark: Self) -> None:
        """Go on where `mark` stands, which may be gone back to again; nothing that was opened since
        counts as failed."""

    def become(self, other: Self) -> None:
        """Go on where `other` stands, with its text and variables; `other` is not to be used any
        more. What is left behind is cancelled."""

    def drop(self) -> None:
        """Cancel it: nobody wants it any more, nor its failures."""

    def scope(self, name: str, defaults: Mapping[str, Any]) -> Self:
        """The same branch for a program `name` that is called on it: with variables of its own,
        and `defaults` that override the sampling options of the caller."""

    def saved(self) -> Saved:
        """All that it holds, to be asked for once everything is over."""

    def restore(self, saved: Saved) -> None:
        """Append what a state held that has ended."""

    def join(self, forks: Sequence[Self], mode: str) -> None:
        """End `forks`, and bring back their variables ("gather_variable") or their texts."""
