"""What a batch has answered so far: one line for each row, written as the row ends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from rootlace.runtime.gateway.http.batches.batch import Batch
from rootlace.runtime.gateway.http.batches.file_store import FileStore

_NUMBER = re.compile(rb'\{"id":"batch_req_\w+_(\d+)"')


@dataclass(frozen=True)
class Answer:
    """The reply to one row, as it would have come over HTTP."""

    custom_id: str | None
    status: int
    body: object


class Results:
    """The two files of a batch, open for writing: good answers, and errors.

    A server that ended in the middle of a line left it unfinished; that row counts as not done.
    """

    def __init__(self, files: FileStore, batch: Batch) -> None:
        self._files = files
        self._batch = batch
        hexes = batch.id.removeprefix("batch_")
        self._ids = (f"file-{hexes}-output", f"file-{hexes}-errors")
        self.done: set[int] = set()
        self._bytes = 0
        self._open: list[BinaryIO] = []

    def __enter__(self) -> Self:
        counts = self._batch.request_counts
        numbers = []
        for id_ in self._ids:
            numbers.append(_recover(self._files.path(id_)))
            self._open.append(self._files.path(id_).open("ab", buffering=0))
            self._bytes += self._open[-1].tell()
        counts.completed, counts.failed = map(len, numbers)
        self.done = numbers[0] | numbers[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._open:
            file.close()

    def write(self, number: int, answer: Answer) -> None:
        """Raises InvalidRequest when the folder is full."""
        request_id = f"{self._batch.id.replace('batch_', 'batch_req_')}_{number}"
        line = msgspec.json.encode(
            {
                "id": request_id,
                "custom_id": answer.custom_id,
                "response": {
                    "status_code": answer.status,
                    "request_id": request_id,
                    "body": answer.body,
                },
                "error": None,
            }
        )
        self._bytes += len(line) + 1
        self._files.check_room(self._bytes)
        good = answer.status < 400
        self._open[not good].write(line + b"\n")
        counts = self._batch.request_counts
        counts.completed += good
        counts.failed += not good

    def keep(self) -> None:
        """Make files of what was written, for clients to read."""
        found: list[str | None] = []
        for id_, noun in zip(self._ids, ("output", "error"), strict=True):
            path = self._files.path(id_)
            if path.stat().st_size:
                name = f"{self._batch.id}_{noun}.jsonl"
                self._files.add(path, name, "batch_output", self._batch.owner, id_)
                found.append(id_)
            else:
                path.unlink()
                found.append(None)
        self._batch.output_file_id, self._batch.error_file_id = found


def _recover(path: Path) -> set[int]:
    """The numbers of the rows that have whole lines; what follows the last one is cut off."""
    if not path.exists():
        return set()
    numbers, whole = set(), 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            if found := _NUMBER.match(line):
                numbers.add(int(found[1]))
        file.truncate(whole)
    return numbers
