"""What engines were told to forget, for those that may not have heard of it, or not done it yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import Flush, ForgetNamespace
from rootlace.runtime.engine.client.forget_file import ForgetFile

SECONDS = 60.0
"""So long after it was told, what is to be forgotten may still be on an engine's disk: it may be in
a step, or hang, and erases behind what it writes."""
MOST = 65536
"""Of more than that, all is forgotten."""
SPARE_LINES = 64
"""The file may have so many lines, and as many as it needs, that are of no use any more."""

log = logging.getLogger(__name__)


class Forgets:
    """An engine that dies leaves its blocks on a disk, where it, or whichever of its siblings is
    started again first, finds them. So each is told again as it starts what was to be forgotten
    since an engine went down, and shortly before that; with a `file`, the engines of the next
    server are, too. `keep`: all that was ever to be forgotten is told, to engines of machines that
    were away for a while, with disks of their own."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        file: ForgetFile | None = None,
        keep: bool = False,
    ) -> None:
        self._clock = clock
        self._file = file
        self._keep = keep
        self._told: dict[Flush | ForgetNamespace, float] = {}
        """When it was told, the oldest first."""
        self._down = 0
        for message in [] if file is None else file.read():
            self._told[message] = clock()

    @classmethod
    def of(cls, config: EngineConfig) -> Forgets:
        """In a file where the engines of this machine keep blocks on a disk."""
        if not config.cache.disk:
            return cls()
        try:
            root = Path(config.cache.disk).expanduser()
            return cls(file=ForgetFile(root, config.executor.model))
        except OSError as error:
            log.error("what is to be forgotten ends with this process: %s", error)
            return cls()

    def note(self, message: Flush | ForgetNamespace) -> None:
        """All engines are told it now, those that are down in vain."""
        whole = isinstance(message, Flush) or len(self._told) >= MOST
        if whole:
            self._told.clear()
            message = Flush(0)  # nobody waits for the answer
        self._told.pop(message, None)
        self._told[message] = self._clock()
        self._write(None if whole else message)
        self.drop_old()

    def died(self) -> None:
        """An engine is down."""
        self.drop_old()
        self._down += 1

    def to_started(self, returned: bool) -> list[Flush | ForgetNamespace]:
        """An engine is there, one of those that were down if it `returned`: what it is to be told
        before anything else."""
        self._down -= returned
        self._told = dict.fromkeys(self._told, self._clock())
        return list(self._told)

    def drop_old(self) -> None:
        """Let go of what all have done by now."""
        if self._keep:
            return
        oldest, had = self._clock() - SECONDS, len(self._told)
        while not self._down and self._told and self._told[next(iter(self._told))] < oldest:
            del self._told[next(iter(self._told))]
        if had and not self._told:
            self._write(None)

    def close(self) -> None:
        """The next server finds the rest. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, message: Flush | ForgetNamespace | None) -> None:
        """Keep this message, too, or, without one, only what is needed."""
        if self._file is None:
            return
        try:
            if message is None or self._file.lines >= 2 * len(self._told) + SPARE_LINES:
                self._file.replace(list(self._told))
            else:
                self._file.add(message)
        except OSError as error:
            log.error("what is to be forgotten is not on the disk: %s", error)
