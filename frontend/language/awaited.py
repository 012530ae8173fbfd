"""What reading gives in an `async def` program: a value that has to be awaited first."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, NoReturn, TypeVar

from rootlace.language.failures import ProgramError, Site, call_site, warn
from rootlace.wire.errors import InvalidRequest

C = TypeVar("C", bound=type)

# What cannot be done to something that is not a value yet.
_USES = (
    *("bool", "str", "format", "hash", "eq", "ne", "lt", "le", "gt", "ge"),
    *("len", "iter", "contains", "call", "getitem", "int", "float", "index", "neg"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "mod", "rmod"),
)


def refuses_use(cls: C) -> C:
    """A class decorator: every use of an instance as a value calls its `_used`, except what the
    class defines itself."""
    for use in _USES:
        name = f"__{use}__"
        if getattr(cls, name, None) is getattr(object, name, None):
            setattr(cls, name, cls._used)  # type: ignore[attr-defined]
    return cls


@refuses_use
class Awaited(Coroutine[Any, Any, Any]):
    """A value that is read with `await`, once or more often.

    Any other use is a forgotten `await`, which would go on with a wrong value (`s["x"] == "yes"`
    would be False): it raises a ProgramError that names the line. One that is let go without any
    use is warned of, as a coroutine is. It can be given to `asyncio.gather` and `create_task`, as a
    coroutine can.
    """

    __slots__ = ("_args", "_coroutine", "_noticed", "_read", "_what")

    def __init__(
        self, what: str, read: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> None:
        """`what` is how the program's author wrote it; `await` runs `read(*args)`."""
        self._what = what
        self._read = read
        self._args = args
        self._coroutine: Coroutine[Any, Any, Any] | None = None
        self._noticed = False  # awaited, or the program was told that it was not

    def __del__(self) -> None:
        if not self._noticed:
            warn(f"`{self._what}` was never awaited", RuntimeWarning)

    def _used(self, *_: object, **__: object) -> NoReturn:
        """Raise the error of a forgotten `await`."""
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
    """Raise the error of a forgotten `await` if `value` is something to be awaited. `site`: the
    line to blame, where it is not the one that calls."""
    if isinstance(value, Awaited):
        value._refuse(site or call_site())
