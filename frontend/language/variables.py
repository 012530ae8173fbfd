"""What a program can read: values that may not be there yet.

Everything readable says what must be over before it can be read. Then `get` gives the value, or
raises the `ProgramError` of the operation that failed. The reader decides how to wait (blocking or
awaiting), so this file knows nothing of threads and event loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol


class UnknownVariable(KeyError):
    """The program has used no variable of this name."""


def unknown(name: str, variables: Iterable[str]) -> UnknownVariable:
    known = ", ".join(sorted(variables)) or "none"
    return UnknownVariable(f"no variable {name!r} in this state; there are: {known}")


class Pending(Protocol):
    """Something that will be over."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block until it is over."""

    async def wait_async(self) -> None: ...

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once it is over, in any thread."""


class Readable(Protocol):
    """Something that can be read once all that it requires is over."""

    def requires(self) -> Iterable[Pending]: ...

    def get(self) -> Any: ...

    def written(self) -> Any:
        """As `get`, but generated values as the text that the model wrote."""

    def meta(self) -> Any: ...

    def saved(self) -> Readable:
        """The same without what it came from: for states that outlive their runtime."""


class Constant:
    """A value that is known: what `set_var` stored."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def requires(self) -> Iterable[Pending]:
        return ()

    def get(self) -> Any:
        return self.value

    written = get

    def meta(self) -> Any:
        return None

    def saved(self) -> Readable:
        return self


class Gathered:
    """A variable of several joined forks: a list, in the order of the forks."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Readable]) -> None:
        self.parts = list(parts)

    def requires(self) -> Iterable[Pending]:
        for part in self.parts:
            yield from part.requires()

    def get(self) -> list[Any]:
        return [part.get() for part in self.parts]

    def written(self) -> list[Any]:
        return [part.written() for part in self.parts]

    def meta(self) -> list[Any]:
        return [part.meta() for part in self.parts]

    def saved(self) -> Readable:
        return Gathered([part.saved() for part in self.parts])
