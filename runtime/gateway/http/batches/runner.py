"""Runs batches, those of one API key one after the other, a few rows at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.batches.batch import Batch
from rootlace.runtime.gateway.http.batches.results import Answer, Results
from rootlace.runtime.gateway.http.batches.storage import Storage
from rootlace.runtime.gateway.http.body import Body, decode_anywhere
from rootlace.runtime.gateway.http.errors import InvalidParameter, error_body
from rootlace.runtime.gateway.keys.account import set_caller
from rootlace.runtime.gateway.rooms import Rooms
from rootlace.wire.errors import (
    Cancelled,
    DeadlineImpossible,
    InvalidRequest,
    Overloaded,
    PinRefused,
    RootlaceError,
    ServerUnavailable,
)

log = logging.getLogger(__name__)

# Of all batches together: so few that requests of people who wait are hardly slowed.
ROWS_AT_ONCE = 4
MAX_ROWS = 50_000
RETRY_SECONDS = 1.0
# A row that the engine did not survive so often is an error.
TRIES = 3


Answerer = Callable[[Any], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True)
class Answering:
    """How the rows of one endpoint are answered: by what answers its requests."""

    body: type[Any]
    answer: Answerer


class Row(Body, kw_only=True):
    """One line of a batch's input."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: str
    body: msgspec.Raw


@dataclass(frozen=True)
class _Place:
    """Where a row stands in the input."""

    number: int
    offset: int
    length: int


class Runner:
    """Runs what is unfinished in `storage`, the oldest batch of each owner first.

    Owners do not wait for each other: rows of one may have to wait for its quota.
    """

    def __init__(
        self, server: Gateway | Rooms, storage: Storage, answers: Mapping[str, Answering]
    ) -> None:
        self._server = server
        self._storage = storage
        self._answers = answers
        self._more = asyncio.Event()
        self._working: dict[str, asyncio.Task[None]] = {}
        """By owner, what finishes a batch."""
        self._running: dict[str, asyncio.Task[None]] = {}
        """By the batch's id, its rows."""
        self._answering = asyncio.Semaphore(ROWS_AT_ONCE)
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """There is a new batch."""
        self._more.set()

    def cancel(self, batch: Batch) -> None:
        """End a batch; what it has answered so far is kept."""
        batch.enter("cancelling")
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
        """Finish a batch, or note why it cannot be; its owner's next one follows."""
        try:
            await self._finish(batch)
        except Exception as error:
            log.exception("batch %s", batch.id)
            batch.fail(
                "storage_error" if isinstance(error, OSError) else "server_error", str(error)
            )
            with contextlib.suppress(OSError):
                self._storage.batches.put(batch)
        finally:
            del self._working[batch.owner]
            self._more.set()

    async def _finish(self, batch: Batch) -> None:
        """Run the batch to one of its ends."""
        with Results(self._storage.files, batch) as results:
            end = "completed"
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
                if isinstance(error, RootlaceError):
                    batch.fail(error.code, str(error))
                elif error is not None:
                    log.error("batch %s", batch.id, exc_info=error)
                    batch.fail("server_error", "internal error")
                elif time.time() >= batch.expires_at and not batch.request_counts.all_done:
                    end = "expired"
            if batch.status == "cancelling":
                end = "cancelled"
            results.keep()
            if batch.status != "failed":
                batch.enter(end)
            self._storage.batches.put(batch)

    async def _rows(self, batch: Batch, results: Results) -> None:
        if batch.owner:  # its rows are the key's requests, in the tasks that begin here
            set_caller(self._server.keys.named(batch.owner))
        path = self._storage.files.path(batch.input_file_id)
        total, places = await asyncio.to_thread(_places, path, results.done)
        batch.request_counts.total = total
        if not 0 < total <= MAX_ROWS:
            raise InvalidRequest(f"the file has {total} rows; a batch has from 1 to {MAX_ROWS}")
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
            results.write(place.number, answer)

    async def _answer(self, batch: Batch, line: bytes) -> Answer:
        """The reply to one row. Whatever is wrong with the row is its reply."""
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
                        answering = self._answers[batch.endpoint]
                        body = await decode_anywhere(memoryview(row.body), answering.body)
                        if getattr(body, "stream", None):
                            raise InvalidParameter("stream", "stream: rows are answered whole")
                        return Answer(custom_id, 200, await answering.answer(body))
            except (PinRefused, DeadlineImpossible) as error:
                return Answer(custom_id, error.http_status, error_body(error))
            except (Overloaded, ServerUnavailable, Cancelled) as error:
                tries += not isinstance(error, Overloaded)
                if tries == TRIES:
                    return Answer(custom_id, error.http_status, error_body(error))
                told = error.retry_after if isinstance(error, Overloaded) else None
                wait = RETRY_SECONDS if told is None else told
                await asyncio.sleep(wait)
            except RootlaceError as error:
                shown = custom_id or _custom_id(line)
                return Answer(shown, error.http_status, error_body(error))
            except Exception as error:
                log.exception("a row of batch %s", batch.id)
                return Answer(custom_id, 500, error_body(error))

    async def _row(self, batch: Batch, line: bytes) -> Row:
        most = self._server.config.max_body_bytes
        if len(line) > most:
            raise InvalidRequest(f"the row has {len(line)} bytes, at most {most} are allowed")
        row = await decode_anywhere(line, Row)
        if row.url != batch.endpoint:
            raise InvalidParameter(
                "url", f"url: {row.url!r} is not the batch's endpoint, {batch.endpoint!r}"
            )
        return row


def _places(path: Path, done: set[int]) -> tuple[int, list[_Place]]:
    """How many rows a file has, and where those are that are not `done`. Lines count from 1;
    empty ones are no rows."""
    total = offset = 0
    places = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                total += 1
                if number not in done:
                    places.append(_Place(number, offset, len(line)))
            offset += len(line)
    return total, places


def _read(path: Path, place: _Place) -> bytes:
    with path.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.length)


def _custom_id(line: bytes) -> str | None:
    """That of a row that is wrong, if it can be read."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found = row.get("custom_id") if isinstance(row, dict) else None
    return found if isinstance(found, str) else None
