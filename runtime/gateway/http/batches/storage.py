"""The folder of `--files`: files and batches, for one server at a time."""

from __future__ import annotations

import fcntl
from collections import Counter
from pathlib import Path

import msgspec

from rootlace.runtime.gateway.http.batches.batch import Batch
from rootlace.runtime.gateway.http.batches.disk import private
from rootlace.runtime.gateway.http.batches.file_store import Bounds, FileStore
from rootlace.runtime.gateway.http.batches.records import Records
from rootlace.wire.errors import InvalidRequest

# Of batches that have ended; of the key that has the most, the oldest are forgotten first.
MAX_BATCHES = 1000


class Storage:
    """What the folder holds. Raises InvalidRequest if the folder cannot be used."""

    def __init__(self, folder: Path, bounds: Bounds) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open(folder / "lock", "wb", opener=private)  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.files = FileStore(folder / "files", bounds)
            self.batches = Records(folder / "batches", Batch, "batch")
            self.forget_old()
            unfinished = (batch for batch in self.batches.all() if batch.unfinished)
            self.files.forget_unknown({id_ for batch in unfinished for id_ in batch.result_ids})
        except BlockingIOError:
            raise InvalidRequest(f"{folder} is used by another server; give it its own") from None
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(f"{folder} cannot keep files: {error}") from error

    def close(self) -> None:
        self._lock.close()

    def forget_old(self) -> None:
        """Forget files whose time is over, and the oldest batches if there are too many."""
        batches = self.batches.all()
        ended = [batch for batch in batches if not batch.unfinished]
        owners = Counter(batch.owner for batch in ended)
        for _ in range(len(ended) - MAX_BATCHES):
            ((most, _),) = owners.most_common(1)
            oldest = next(batch for batch in ended if batch.owner == most)
            ended.remove(oldest)
            owners[most] -= 1
            self.batches.drop(oldest.id)
        self.files.forget_old({b.input_file_id for b in batches if b.unfinished})
