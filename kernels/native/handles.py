"""What the library hands out, freed with the Python object that holds it."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable


class Team:
    """Threads that compute, the calling one among them; see `src/team.h`."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.handle: int = library.rl_team_new(threads)
        _free_with(self, library.rl_team_free, self.handle)


class Workspace:
    """What the forward pass of one model keeps between steps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.handle: int = library.rl_workspace_new()
        _free_with(self, library.rl_workspace_free, self.handle)


def _free_with(holder: object, free: Callable[[int], None], handle: int) -> None:
    # Not when the interpreter ends: a daemon thread may be inside a call then.
    weakref.finalize(holder, free, handle).atexit = False
