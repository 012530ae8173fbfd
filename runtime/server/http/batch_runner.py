"""Runner of batches: an API key's one after the other, a few rows at a time."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Literal, Self

import msgspec
from aiohttp import web

from rootlace.runtime.server.auth import ASKER, Asker, caller
from rootlace.runtime.server.full_disk import FULL
from rootlace.runtime.server.http.batch_store import (
    Batch,
    Bounds,
    FileStore,
    Records,
    RecordType,
    Storage,
    private,
)
from rootlace.runtime.server.http.body import LARGE_BYTES, Body, decode_anywhere
from rootlace.runtime.server.http.endpoint import Endpoint
from rootlace.runtime.server.http.errors import InvalidParameter, error_body
from rootlace.runtime.server.http.replies import one_line
from rootlace.runtime.server.model_registry import ModelRegistry
from rootlace.runtime.server.served_model import ServedModel
from rootlace.wire.errors import (
    Cancelled,
    DeadlineImpossible,
    InvalidRequest,
    Overloaded,
    PinRefused,
    RootlaceError,
    ServerUnavailable,
)

# Results ------------------------------------------------------------------------------------------
#
# Results of a batch so far: one line for each row, written as the row ends.


_NUMBER = re.compile(rb'\{"id":"batch_req_\w+_(\d+)"')


class Answer(msgspec.Struct, frozen=True):
    """Reply to one row, as it would have come over HTTP."""

    custom_id: str | None
    status: int
    body: object


class Results:
    """Results of a batch: two files, open for writing, of good answers and of errors.

    A server that ends within a line leaves the line unfinished; the row counts as not done.
    """

    def __init__(self, files: FileStore, batch: Batch) -> None:
        self._files = files
        self._batch = batch
        self.done: set[int] = set()
        self._open: list[_Lines] = []

    @contextlib.contextmanager
    def opened(self) -> Iterator[Self]:
        """Open the files while the block runs. Raises OSError."""
        counts = self._batch.request_counts
        numbers = []
        with contextlib.ExitStack() as stack:
            for id_ in self._batch.result_ids:
                numbers.append(_recover(self._files.path(id_)))
                self._open.append(
                    stack.enter_context(contextlib.closing(_Lines(self._files.path(id_))))
                )
            counts.completed, counts.failed = map(len, numbers)
            self.done = numbers[0] | numbers[1]
            yield self

    def write(self, number: int, answer: Answer) -> None:
        """Write an answer. Raises Overloaded if the folder, or the owner's share, is full, and
        OSError; nothing is written then."""
        request_id = f"{self._batch.id.replace('batch_', 'batch_req_')}_{number}"
        response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
        row = {"id": request_id, "custom_id": answer.custom_id, "response": response, "error": None}
        line = one_line(msgspec.json.encode(row)) + b"\n"
        good = answer.status < 400
        file, content = self._open[not good], self._files.path(self._batch.result_ids[not good])
        self._files.grow(content, self._batch.owner, file.size + len(line))
        file.write(line)
        counts = self._batch.request_counts
        counts.completed += good
        counts.failed += not good

    def keep(self, or_drop: bool = False) -> None:
        """Make files for clients of the written lines. Raises OSError; it can be called again.
        `or_drop`, for a batch that goes no further, drops what cannot be kept."""
        batch, file_ids = self._batch, list[str | None]()
        for id_, noun in zip(batch.result_ids, ("output", "error"), strict=True):
            path, file = self._files.path(id_), None
            try:
                if or_drop:
                    _recover(path)
                if path.exists() and path.stat().st_size:
                    name = f"{batch.id}_{noun}.jsonl"
                    file = self._files.add(path, name, "batch_output", batch.owner, id_)
                else:
                    self._files.drop(path)
            except OSError:
                if not or_drop:
                    raise
                with contextlib.suppress(OSError):
                    self._files.drop(path)
            file_ids.append(None if file is None else file.id)
        batch.output_file_id, batch.error_file_id = file_ids


class _Lines:
    """File of whole lines, open for more."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115
        self.size = self._file.tell()

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError, and cuts off the part already written."""
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
    """Return the numbers of rows with whole lines; cut off anything behind the last one."""
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


# Runner -------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

# Rows of all batches at once: few, so that interactive requests are hardly slowed.
ROWS_AT_ONCE = 4
MAX_ROWS = 50_000
RETRY_SECONDS = 1.0
ROOM_SECONDS = 2.0
"""Time between attempts to write while the disk, or a share of files, is full."""
SETTLED_SECONDS = 60.0
"""Time without a full disk after which the log says once that there is room again."""
# A row that the engine did not survive this often becomes an error.
TRIES = 3


class _Named(msgspec.Struct):
    custom_id: str


class Row(Body, kw_only=True):
    """Line of a batch's input."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: str
    body: msgspec.Raw


class _Place(msgspec.Struct, frozen=True):
    """Place of a row in the input."""

    number: int
    offset: int
    length: int


class Runner:
    """Runner of the unfinished batches in `storage`, the oldest of each owner first.

    Owners do not wait for each other: rows of one may have to wait for its quota.
    """

    def __init__(
        self, server: ServedModel | ModelRegistry, storage: Storage, answers: Mapping[str, Endpoint]
    ) -> None:
        self._server = server
        self._storage = storage
        self._answers = answers
        self._more = asyncio.Event()
        self._working: dict[str, asyncio.Task[None]] = {}
        """Tasks that finish a batch, by owner."""
        self._running: dict[str, asyncio.Task[None]] = {}
        """Tasks of a batch's rows, by the batch's id."""
        self._answering = asyncio.Semaphore(ROWS_AT_ONCE)
        self._full_at = -math.inf
        """Time when the disk, or a share, was last full, by `time.monotonic`."""
        self._said_full = False
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look for a new batch."""
        self._more.set()

    def cancel(self, batch: Batch) -> None:
        """End a batch; its answers so far are kept."""
        batch.enter("cancelling")
        with contextlib.suppress(OSError):  # stored again at the batch's end
            self._storage.batches.put(batch)
        if batch.id in self._running:
            self._running[batch.id].cancel()

    async def stop(self) -> None:
        """Stop in the middle: the next server goes on."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        try:
            while True:
                self._more.clear()
                for batch in self._storage.batches.all():
                    if batch.unfinished and batch.owner not in self._working:
                        self._working[batch.owner] = asyncio.create_task(self._try(batch))
                await self._more.wait()
        finally:
            working = list(self._working.values())
            for task in working:
                task.cancel()
            if working:
                await asyncio.wait(working)

    async def _try(self, batch: Batch) -> None:
        """Finish a batch, or note why it failed; its owner's next batch follows."""
        try:
            while True:
                try:
                    await self._finish(batch)
                    break
                except OSError as error:
                    await self._wait_for_disk(error)
            self._note_disk()
        except Exception as error:
            log.exception("batch %s", batch.id)
            Results(self._storage.files, batch).keep(or_drop=True)
            _fail(batch, error)
            with contextlib.suppress(OSError):
                self._storage.batches.put(batch)
        finally:
            del self._working[batch.owner]
            self._more.set()

    async def _wait_for_disk(self, error: OSError | Overloaded) -> None:
        """Sleep until the next attempt to write to a full disk or share; raise other errors."""
        if isinstance(error, OSError) and error.errno not in FULL:
            raise error
        now, before = time.monotonic(), self._full_at
        self._full_at = now
        if now - before >= SETTLED_SECONDS:
            self._said_full = True
            log.warning("batches wait: %s", error)
        await asyncio.sleep(ROOM_SECONDS)

    def _note_disk(self) -> None:
        """Note a successful write. A short line finds room where a long one did not."""
        if self._said_full and time.monotonic() - self._full_at >= SETTLED_SECONDS:
            self._said_full = False
            log.warning("batches go on: there is room again")

    async def _finish(self, batch: Batch) -> None:
        """Run the batch to one of its ends. After an exception it can be called again."""
        with Results(self._storage.files, batch).opened() as results:
            end = "completed"
            error: BaseException | None = None
            if batch.status != "cancelling":
                batch.enter("in_progress")
                self._storage.batches.put(batch)
                running = asyncio.create_task(self._rows(batch, results))
                self._running[batch.id] = running
                try:
                    await asyncio.wait([running])
                finally:  # cancelled: the server stops
                    del self._running[batch.id]
                    running.cancel()
                    await asyncio.wait([running])
                error = None if running.cancelled() else running.exception()
                if error is not None:
                    end = "failed"
                elif time.time() >= batch.expires_at and not batch.request_counts.all_done:
                    end = "expired"
            if batch.status == "cancelling":
                end = "cancelled"
            results.keep()
            ended = copy.copy(batch)  # clients see the end once it is stored
            if end == "failed" and error is not None:
                if not isinstance(error, RootlaceError):
                    log.error("batch %s", batch.id, exc_info=error)
                _fail(ended, error)
            else:
                ended.enter(end)
            self._storage.batches.put(ended)

    async def _rows(self, batch: Batch, results: Results) -> None:
        if batch.owner:  # rows are the key's requests, in the tasks that begin here
            ASKER.set(Asker.of(self._server.keys.named(batch.owner), ASKER.get().source))
        path = self._storage.files.path(batch.input_file_id)
        total, places = await asyncio.to_thread(_places, path, results.done)
        batch.request_counts.total = total
        if not 0 < total <= MAX_ROWS:
            rows = f"more than {MAX_ROWS} rows" if total else "0 rows"
            raise InvalidRequest(f"the file has {rows}; a batch has from 1 to {MAX_ROWS}")
        left = iter(places)
        workers = [
            asyncio.create_task(self._work(batch, left, results)) for _ in range(ROWS_AT_ONCE)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    async def _work(self, batch: Batch, left: Iterator[_Place], results: Results) -> None:
        path = self._storage.files.path(batch.input_file_id)
        for place in left:
            if time.time() >= batch.expires_at:
                return
            answer = await self._answer(batch, _read(path, place))
            while True:
                try:
                    results.write(place.number, answer)
                except (OSError, Overloaded) as error:  # the computed answer is not lost
                    if isinstance(error, Overloaded) and time.time() >= batch.expires_at:
                        return  # nobody made room
                    await self._wait_for_disk(error)
                else:
                    break
            self._note_disk()

    async def _answer(self, batch: Batch, line: bytes) -> Answer:
        """Return the reply to one row; a fault of the row is its reply."""
        custom_id = None
        tries = 0
        while True:
            if self._server.drain.begun:
                await asyncio.Event().wait()  # the server stops, and cancels this
            try:
                # A server that stops waits for the rows that have begun.
                async with self._answering:
                    with self._server.drain.request():
                        row = await self._row(batch, line)
                        custom_id = row.custom_id
                        endpoint = self._answers[batch.endpoint]
                        assert endpoint.body is not None
                        body = await decode_anywhere(memoryview(row.body), endpoint.body)
                        if getattr(body, "stream", None):
                            raise InvalidParameter("stream", "stream: rows are answered whole")
                        return Answer(custom_id, 200, await endpoint.call(body))
            except (PinRefused, DeadlineImpossible) as error:
                return Answer(custom_id, error.http_status, error_body(error))
            except (Overloaded, ServerUnavailable, Cancelled) as error:
                tries += not isinstance(error, Overloaded)
                if tries == TRIES:
                    return Answer(custom_id, error.http_status, error_body(error))
                retry_after = error.retry_after if isinstance(error, Overloaded) else None
                wait = RETRY_SECONDS if retry_after is None else retry_after
                await asyncio.sleep(wait)
            except RootlaceError as error:
                shown = custom_id or await self._custom_id(line)
                return Answer(shown, error.http_status, error_body(error))
            except Exception as error:
                log.exception("a row of batch %s", batch.id)
                return Answer(custom_id, 500, error_body(error))

    async def _custom_id(self, line: bytes) -> str | None:
        if len(line) > self._server.config.max_body_bytes:
            return None
        if len(line) > LARGE_BYTES:
            return await asyncio.to_thread(custom_id_of, line)
        return custom_id_of(line)

    async def _row(self, batch: Batch, line: bytes) -> Row:
        max_bytes = self._server.config.max_body_bytes
        if len(line) > max_bytes:
            raise InvalidRequest(f"the row has {len(line)} bytes, at most {max_bytes} are allowed")
        row = await decode_anywhere(line, Row)
        if row.url != batch.endpoint:
            raise InvalidParameter(
                "url", f"url: {row.url!r} is not the batch's endpoint, {batch.endpoint!r}"
            )
        return row


class InvalidLine(InvalidParameter):
    """Line of the input for which the whole batch is refused."""

    def __init__(self, line: int, param: str, message: str) -> None:
        super().__init__(param, message)
        self.line = line


def _fail(batch: Batch, error: BaseException) -> None:
    """Fail the batch for `error`; clients learn nothing about an unexpected error."""
    if isinstance(error, InvalidLine):
        batch.fail(error.code, str(error), error.line, error.param)
    elif isinstance(error, RootlaceError):
        batch.fail(error.code, str(error))
    elif isinstance(error, OSError):
        batch.fail("storage_error", "the server could not read or write the batch's files")
    else:
        batch.fail("server_error", "internal error")


def _places(path: Path, done: set[int]) -> tuple[int, list[_Place]]:
    """Count a file's rows, and find those not `done`. Lines count from 1; empty lines are no rows.
    Raises InvalidLine where two rows have the same `custom_id`."""
    total = offset = 0
    lines: dict[str, int] = {}
    places = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                total += 1
                if total > MAX_ROWS:
                    break
                id_ = custom_id_of(line)
                if id_ is not None and (other := lines.setdefault(id_, number)) != number:
                    reason = f"line {number}: its custom_id {id_!r} is that of line {other}, too"
                    raise InvalidLine(number, "custom_id", reason)
                if number not in done:
                    places.append(_Place(number, offset, len(line)))
            offset += len(line)
    return total, places


def _read(path: Path, place: _Place) -> bytes:
    with path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


def custom_id_of(line: bytes) -> str | None:
    """Return the `custom_id` of a malformed row, if readable; the rest stays undecoded."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# Service ------------------------------------------------------------------------------------------
#
# State shared by the endpoints of files and batches: the folder, while the server runs.


class BatchService:
    """Files and batches. `answers`: endpoints for rows by path, filled in by the routes."""

    def __init__(self, server: ServedModel | ModelRegistry) -> None:
        self._server = server
        self.answers: dict[str, Endpoint] = {}
        self._open: tuple[Storage, Runner] | None = None

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        """Work on batches while the application runs, those of an earlier server first."""
        config = self._server.config
        if config.files or config.state:
            folder = Path(config.files) if config.files else Path(config.state) / "files"
            storage = Storage(folder, Bounds())
            self._open = storage, Runner(self._server, storage, self.answers)
        yield
        if self._open is not None:
            storage, runner = self._open
            await runner.stop()
            storage.close()

    @property
    def storage(self) -> Storage:
        """Return the open folder. Raises InvalidRequest if the server was started without one."""
        return self._opened()[0]

    @property
    def runner(self) -> Runner:
        return self._opened()[1]

    def _opened(self) -> tuple[Storage, Runner]:
        if self._open is None:
            raise InvalidRequest("this server keeps no files and batches: start it with --files")
        return self._open

    def visible(self, records: Records[RecordType]) -> list[RecordType]:
        """Return the records that the caller may see: a key's own, all for the operator."""
        account = caller()
        return [one for one in records.all() if account is None or one.owner == account.name]

    def find(self, records: Records[RecordType], id_: str, param: str | None = None) -> RecordType:
        """Return a record. Raises NotFound, also for another key's record."""
        found = records.get(id_, param)
        account = caller()
        if account is not None and found.owner != account.name:
            raise records.missing(id_, param)
        return found
