"""Whether a store is still used."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class Switch:
    """Of a store: on until something goes wrong with it. Nothing counts after `closed`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.on = True
        self.closed = False

    def off(self, error: OSError) -> None:
        """Nothing is written or read any more."""
        if self.on and not self.closed:
            self.on = False
            log.warning("%s: no blocks are kept there any more: %s", self._path, error)
