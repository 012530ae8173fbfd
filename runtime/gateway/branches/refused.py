"""Branches that could not be opened, for what their client had sent behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rootlace.wire.errors import Cancelled, InvalidRequest, Overloaded, RootlaceError

MOST = 4096
"""Of a session; the oldest are forgotten."""


class Refused:
    """A branch that counts as open can be broken, and says why; those that cannot even be broken
    ones, because there are too many, are here."""

    def __init__(self) -> None:
        self._why: dict[int, str] = {}

    @contextmanager
    def noting(self, branch: int) -> Iterator[None]:
        """While the block opens the branch."""
        self._why.pop(branch, None)
        try:
            yield
        except Overloaded as error:
            self._why[branch] = str(error)
            if len(self._why) > MOST:
                del self._why[next(iter(self._why))]
            raise

    def error(self, branch: int) -> RootlaceError:
        """What an operation on a branch fails with that is not open."""
        if branch in self._why:
            return Cancelled(self._why[branch])
        return InvalidRequest(f"branch {branch} is not open")
