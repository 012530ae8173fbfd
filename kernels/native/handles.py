"""What the library hands out, freed with the Python object that holds it."""

from __future__ import annotations

import ctypes
import weakref


class Team:
    """Threads that compute, the calling one among them; see `src/team.h`."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.handle: int = library.rl_team_new(threads)
        weakref.finalize(self, library.rl_team_free, self.handle)


class Workspace:
    """What the forward pass of one model keeps between steps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.handle: int = library.rl_workspace_new()
        weakref.finalize(self, library.rl_workspace_free, self.handle)
