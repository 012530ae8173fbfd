"""Values that a program reads, possibly before their operation is over.

`Readable.requires` lists the operations that must be over before the value is read. Then `get`
returns the value, or raises the `ProgramError` of the failed operation. The reader decides how to
wait (blocking or awaiting), so this file uses no threads or event loops.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from operator import methodcaller
from typing import Any, NoReturn, Protocol, TypeVar

from rootlace.language.failures import ProgramError, Site, call_site, warn
from rootlace.wire.errors import InvalidRequest

# Awaited ------------------------------------------------------------------------------------------
#
# Result of reading in an `async def` program: a value that has to be awaited first.


C = TypeVar("C", bound=type)

# Operators that need a value, which an Awaited does not have yet.
_USES = (
    *("bool", "str", "format", "hash", "eq", "ne", "lt", "le", "gt", "ge"),
    *("len", "iter", "contains", "call", "getitem", "int", "float", "index", "neg"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "mod", "rmod"),
)


def refuses_use(cls: C) -> C:
    """Make every use of an instance as a value call `_used`, except operators that the class
    defines."""
    for use in _USES:
        name = f"__{use}__"
        if getattr(cls, name, None) is getattr(object, name, None):
            setattr(cls, name, cls._used)  # type: ignore[attr-defined]
    return cls


@refuses_use
class Awaited(Coroutine[Any, Any, Any]):
    """Value that is read with `await`, once or several times.

    Any other use is a forgotten `await`: `s["x"] == "yes"` would be False, a wrong value. Such a
    use raises a ProgramError that names the line. An instance that is dropped unused causes a
    warning, as a coroutine does. `asyncio.gather` and `create_task` accept an instance.
    """

    __slots__ = ("_args", "_coroutine", "_noticed", "_read", "_what")

    def __init__(
        self, what: str, read: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> None:
        """Read with `read(*args)` when awaited. `what` is the program's source expression."""
        self._what = what
        self._read = read
        self._args = args
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._noticed = False  # awaited, or the program was told that it was not

    def __del__(self) -> None:
        if not self._noticed:
            warn(f"`{self._what}` was never awaited", RuntimeWarning)

    def _used(self, *_: object, **__: object) -> NoReturn:
        """Raise ProgramError for a forgotten `await`."""
        self._refuse(call_site())

    def _refuse(self, site: Site) -> NoReturn:
        self._noticed = True
        error = InvalidRequest(f"it has not been awaited; write `await {self._what}`")
        raise ProgramError(site, self._what, error) from error

    def __hash__(self) -> int:
        # A set or dictionary would look for this object. asyncio.gather puts it into one itself.
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "asyncio":
            self._used()
        return id(self)

    def __getattr__(self, name: str) -> Any:
        # asyncio and inspect ask every coroutine for its code and frame.
        if name.startswith(("_", "cr_", "gi_", "ag_")):
            raise AttributeError(name)
        self._used()

    def __repr__(self) -> str:
        return f"<{self._what}, which has not been awaited>"

    # ------------------------------------------------------------ as a coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        self._noticed = True
        awaitable: Awaitable[Any] = self._read(*self._args)
        return awaitable.__await__()

    def _started(self) -> Coroutine[Any, Any, Any]:
        if self._coroutine is None:
            self._noticed = True
            self._coroutine = self._read(*self._args)
        return self._coroutine

    def send(self, value: Any) -> Any:
        return self._started().send(value)

    def throw(self, *error: Any) -> Any:
        return self._started().throw(*error)

    def close(self) -> None:
        self._noticed = True
        if self._coroutine is not None:
            self._coroutine.close()


def check_awaited(value: Any, site: Site | None = None) -> None:
    """Raise ProgramError for a forgotten `await` if `value` is an `Awaited`. `site` is the
    program's line to name; the default is the calling line."""
    if isinstance(value, Awaited):
        value._refuse(site or call_site())


# Variables ----------------------------------------------------------------------------------------


class UnknownVariable(KeyError):
    """Error for a variable name that the program has not used."""

    __str__ = Exception.__str__  # a KeyError would write its text as Python source


def unknown(name: str, variables: Iterable[str]) -> UnknownVariable:
    known = ", ".join(sorted(variables)) or "none"
    return UnknownVariable(f"no variable {name!r} in this state; there are: {known}")


class Pending(Protocol):
    """Operation that ends at some time."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block until the operation is over."""

    async def wait_async(self) -> None: ...

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the operation is over, in any thread."""


class Readable(Protocol):
    """Value that can be read once all operations of `requires` are over."""

    def requires(self) -> Iterable[Pending]: ...

    def get(self) -> Any: ...

    def written(self) -> Any:
        """Return `get`'s value, but generated values as the model's text."""

    def meta(self) -> Any: ...

    def saved(self) -> Readable:
        """Return the value without its operation, for states that outlive their runtime."""


class Constant:
    """Known value, stored by `set_var`."""

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
    """Variable of several joined forks: a list, in the order of the forks."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Readable]) -> None:
        self.parts = list(parts)

    def requires(self) -> Iterable[Pending]:
        for part in self.parts:
            yield from part.requires()

    def get(self) -> list[Any]:
        return self._all(methodcaller("get"))

    def written(self) -> list[Any]:
        return self._all(methodcaller("written"))

    def meta(self) -> list[Any]:
        return self._all(methodcaller("meta"))

    def _all(self, read: Callable[[Readable], Any]) -> list[Any]:
        """Read each part, then raise the first error, so that a handler knows that all parts are
        over."""
        values, errors = [], []
        for part in self.parts:
            try:
                values.append(read(part))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return values

    def saved(self) -> Readable:
        return Gathered([part.saved() for part in self.parts])
