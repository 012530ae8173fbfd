"""What files and batches need of a disk: nobody else reads there, and it may be full."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rootlace.wire.errors import RootlaceError

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors that a disk without room gives."""


class DiskFull(RootlaceError):
    """There is no room on the server's disk for what a client sent."""

    code = "disk_full"
    http_status = 507


@contextmanager
def room_needed() -> Iterator[None]:
    """Raises DiskFull where the block finds no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        log.error("nothing can be kept: %s", error)
        raise DiskFull("the server's disk is full: nothing was kept; try again later") from error


def private(path: str, flags: int) -> int:
    """For `open`: a new file is the server's alone."""
    return os.open(path, flags, 0o600)


def private_folder(path: Path) -> None:
    """A folder that nobody else may look into, also where it was there before."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
