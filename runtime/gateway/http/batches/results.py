"""What a batch has answered so far: one line for each row, written as the row ends."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rootlace.runtime.gateway.http.batches.batch import Batch
from rootlace.runtime.gateway.http.batches.disk import private
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
        self.done: set[int] = set()
        self._open: list[_Lines] = []

    def __enter__(self) -> Self:
        counts = self._batch.request_counts
        numbers = []
        try:
            for id_ in self._batch.result_ids:
                numbers.append(_recover(self._files.path(id_)))
                self._open.append(_Lines(self._files.path(id_)))
        except OSError:
            self.__exit__(None, None, None)
            raise
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
        """Raises Overloaded when the folder, or the owner's share, is full, and OSError: nothing
        was written then."""
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
        line += b"\n"
        good = answer.status < 400
        file, content = self._open[not good], self._files.path(self._batch.result_ids[not good])
        self._files.grow(content, self._batch.owner, file.size + len(line))
        file.write(line)
        counts = self._batch.request_counts
        counts.completed += good
        counts.failed += not good

    def keep(self) -> None:
        """Make files of what was written, for clients to read. Raises OSError; it can be called
        again."""
        output, error = self._batch.result_ids
        kept = self._keep(output, "output"), self._keep(error, "error")
        self._batch.output_file_id, self._batch.error_file_id = kept

    def keep_or_drop(self) -> None:
        """As `keep`, of a batch that goes no further: what cannot be kept is forgotten."""
        output, error = self._batch.result_ids
        kept = self._keep_or_drop(output, "output"), self._keep_or_drop(error, "error")
        self._batch.output_file_id, self._batch.error_file_id = kept

    def _keep_or_drop(self, id_: str, noun: str) -> str | None:
        path = self._files.path(id_)
        try:
            _recover(path)
            return self._keep(id_, noun)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.drop(path)
            return None

    def _keep(self, id_: str, noun: str) -> str | None:
        path = self._files.path(id_)
        if not path.exists() or not path.stat().st_size:
            self._files.drop(path)
            return None
        name = f"{self._batch.id}_{noun}.jsonl"
        return self._files.add(path, name, "batch_output", self._batch.owner, id_).id


class _Lines:
    """A file of whole lines, open for more."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115
        self.size = self._file.tell()

    def write(self, line: bytes) -> None:
        """Raises OSError; what was written of the line is cut off then."""
        left = memoryview(line)
        self._cut()
        try:
            while left:  # a disk that is nearly full takes a part of it
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._cut()
            raise
        self.size += len(line)

    def _cut(self) -> None:
        if self._file.seek(0, os.SEEK_END) != self.size:
            self._file.truncate(self.size)

    def close(self) -> None:
        self._file.close()


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
