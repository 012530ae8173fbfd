"""Records kept in a folder, one JSON file each, and in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from rootlace.runtime.gateway.http.batches.disk import private, private_folder
from rootlace.runtime.gateway.http.errors import RecordNotFound


class Record(Protocol):
    """What has an id, a time, and an owner: the name of an API key, empty for the operator's."""

    id: str
    created_at: int
    owner: str


R = TypeVar("R", bound=Record)

_NEW = ".new"


class Records(Generic[R]):
    """Records by id, oldest first. Only ids that were put are ever made into paths."""

    def __init__(self, folder: Path, kind: type[R], noun: str) -> None:
        self._folder = folder
        self.noun = noun
        private_folder(folder)
        for path in folder.glob(f"{noun}[-_]*{_NEW}"):  # cut off by the end of a server
            path.unlink()
        found = [
            msgspec.json.decode(path.read_bytes(), type=kind) for path in folder.glob("*.json")
        ]
        self._of = {record.id: record for record in sorted(found, key=lambda r: r.created_at)}

    def get(self, id_: str, param: str | None = None) -> R:
        """Raises RecordNotFound."""
        if id_ not in self._of:
            raise RecordNotFound(self.noun, id_, param)
        return self._of[id_]

    def all(self) -> list[R]:
        return list(self._of.values())

    def put(self, record: R) -> None:
        """Keep the record as it is now; a crash leaves the old or the new one, whole.
        Raises OSError, and then has the old one."""
        path = self._path(record.id)
        new = path.with_suffix(_NEW)
        try:
            with open(new, "wb", opener=private) as file:
                file.write(msgspec.json.encode(record))
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self._of[record.id] = record

    def drop(self, id_: str) -> None:
        self._path(id_).unlink(missing_ok=True)
        self._of.pop(id_, None)

    def _path(self, id_: str) -> Path:
        return self._folder / f"{id_}.json"
