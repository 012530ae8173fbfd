"""Files that appear whole or not at all, whatever ends the process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

UNFINISHED = "new-"
"""How the names begin of files that are being written, and of those a killed process left."""


def write_whole(path: Path, content: bytes) -> None:
    """Write `path`, whose folder is there. Raises OSError, and then leaves what was there."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as new:
        try:
            new.write(content)
            new.flush()
            os.fsync(new.fileno())  # the name must not outlive the content
            Path(new.name).rename(path)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise
