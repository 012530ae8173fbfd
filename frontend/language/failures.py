"""Source lines of a program's operations, and the exception that names the failed line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, NamedTuple

from rootlace.wire.errors import RootlaceError


class Site(NamedTuple):
    """Line of the user's program."""

    filename: str
    lineno: int
    function: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.lineno}"


NOWHERE = Site("<unknown>", 0, "<unknown>")


def call_site() -> Site:
    """Return the innermost line outside this package. Cheap, since every expression looks it up."""
    frame = sys._getframe(1)
    # By module, not by file: the methods that dataclasses generate have no file.
    while frame.f_globals.get("__name__", "").partition(".")[0] == "rootlace":
        if frame.f_back is None:
            return NOWHERE
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside this package."""
    depth = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("rootlace."):
        frame = frame.f_back
        depth += 1
    warnings.warn(message, category, stacklevel=depth)


class ProgramError(RootlaceError):
    """Failure of a program's operation.

    `filename`, `lineno` and `function` name the program's line, `what` the operation. `reason` and
    `code` are the server's; `__cause__` is the typed error of `rootlace.wire.errors`.
    """

    def __init__(self, site: Site, what: str, error: RootlaceError) -> None:
        super().__init__(f"{site}: {what} failed: {error} [{error.code}]")
        self.filename = site.filename
        self.lineno = site.lineno
        self.function = site.function
        self.what = what
        self.reason = str(error)
        self.code = error.code
        self.http_status = error.http_status
        self.__cause__ = error

    def __reduce__(self) -> Any:
        site = Site(self.filename, self.lineno, self.function)
        return type(self), (site, self.what, self.__cause__)


class Failure:
    """Failed operation, kept until the program reads its result.

    Each reader gets a new exception, since one instance raised in several threads would mix
    tracebacks. `seen`: the program has met the exception, so its end does not raise it again.
    `ended_by`: the program's own exception, for which the operation was cancelled; readers get it
    instead.
    """

    __slots__ = ("ended_by", "error", "seen", "site", "what")

    def __init__(
        self, site: Site, what: str, error: RootlaceError, ended_by: BaseException | None = None
    ) -> None:
        self.site = site
        self.what = what
        self.error = error
        self.ended_by = ended_by
        self.seen = False

    def exception(self) -> BaseException:
        self.seen = True
        return self.ended_by or ProgramError(self.site, self.what, self.error)
