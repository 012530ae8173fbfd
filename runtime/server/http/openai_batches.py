"""OpenAI's `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from aiohttp import BodyPartReader, web

from rootlace.runtime.server.auth import caller, owner
from rootlace.runtime.server.http.batch_runner import BatchService
from rootlace.runtime.server.http.batch_store import (
    MAX_PAGE,
    Batch,
    Deleted,
    File,
    Listing,
    PageQuery,
    page,
    private,
    space_needed,
)
from rootlace.runtime.server.http.body import Body, ignored
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.server_state import kept_for_others
from rootlace.wire.errors import DeadlineExceeded, InvalidRequest, Overloaded

# Batches ------------------------------------------------------------------------------------------


MAX_UNFINISHED = 100
_WINDOW_SECONDS = 24 * 3600


class BatchBody(Body, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: Annotated[
        dict[str, Any] | None, ignored("files are kept for 30 days")
    ] = None


class Batches:
    """Handlers of batches."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    async def create(self, body: BatchBody) -> Batch:
        storage = self._service.storage
        storage.forget_old()
        if body.endpoint not in self._service.answers:
            known = ", ".join(self._service.answers)
            raise InvalidParameter("endpoint", f"endpoint must be one of {known}")
        self._service.find(storage.files.records, body.input_file_id, "input_file_id")
        unfinished = [batch for batch in storage.batches.all() if batch.unfinished]
        account = caller()
        max_batches = None if account is None else account.entry.max_batches
        owners = Counter(batch.owner for batch in unfinished)
        count, taken = owners.get(owner(), 0), len(unfinished)
        if max_batches is not None and count >= max_batches:
            raise Overloaded(f"the API key may have {max_batches} unfinished batches (max_batches)")
        if taken >= MAX_UNFINISHED:
            raise Overloaded(f"{MAX_UNFINISHED} batches are unfinished")
        if owner() and kept_for_others(count, len(owners), taken, MAX_UNFINISHED):
            raise Overloaded(
                f"{count} batches of this API key are unfinished: the last of {MAX_UNFINISHED} are "
                "for others"
            )
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + _WINDOW_SECONDS,
            metadata=body.metadata,
            owner=owner(),
        )
        with space_needed():
            storage.batches.put(batch)
        self._service.runner.wake()
        return batch

    async def get(self, id: str) -> Batch:
        return self._service.find(self._service.storage.batches, id)

    async def list(self, query: PageQuery) -> Listing[Batch]:
        return page(query, self._service.visible(self._service.storage.batches), 20)

    async def cancel(self, id: str) -> Batch:
        batch = await self.get(id)
        if not batch.unfinished:
            raise InvalidRequest(f"the batch is {batch.status} and cannot be cancelled")
        self._service.runner.cancel(batch)
        return batch


# Files --------------------------------------------------------------------------------------------


UPLOAD_SECONDS = 600.0
"""Time after which an unfinished upload is refused, which frees its connection and disk space."""
_PIECE_BYTES = 2**16
_FIELD_BYTES = 1024
_IGNORED = ("expires_after[anchor]", "expires_after[seconds]")


class FilesQuery(PageQuery):
    """`purpose`: only files for it."""

    purpose: str = ""


class Files:
    """Handlers of files."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    async def upload(self, request: web.Request) -> File:
        storage = self._service.storage
        storage.forget_old()
        content = storage.files.new_upload(owner())
        try:
            with space_needed():
                try:
                    async with asyncio.timeout(UPLOAD_SECONDS):
                        fields, filename = await self._receive(request, content)
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"the body did not come within {UPLOAD_SECONDS:g} s"
                    ) from None
                if filename is None:
                    raise InvalidParameter("file", "file is missing")
                if fields.get("purpose") != "batch":
                    raise InvalidParameter(
                        "purpose", "purpose must be 'batch': files are for batches"
                    )
                file = storage.files.add(content, filename, "batch", owner())
        finally:
            storage.files.drop(content)
        return file

    async def list(self, query: FilesQuery) -> Listing[File]:
        files = self._service.visible(self._service.storage.files.records)
        found = [file for file in files if query.purpose in ("", file.purpose)]
        return page(query, found, MAX_PAGE)

    async def get(self, id: str) -> File:
        return self._service.find(self._service.storage.files.records, id)

    async def content(self, id: str) -> web.FileResponse:
        file = await self.get(id)
        path = self._service.storage.files.path(file.id)
        return web.FileResponse(path, headers={"Content-Type": "application/jsonl"})

    async def delete(self, id: str) -> Deleted:
        storage = self._service.storage
        file = await self.get(id)
        for batch in storage.batches.all():
            if batch.unfinished and batch.input_file_id == file.id:
                raise InvalidRequest(f"{batch.id} reads this file: cancel it first")
        storage.files.delete(file.id)
        return Deleted(file.id, "file")

    async def _receive(
        self, request: web.Request, content: Path
    ) -> tuple[dict[str, str], str | None]:
        """Return the form's fields and the file's name; write the file to `content`."""
        fields: dict[str, str] = {}
        filename = None
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader) or part.name is None:
                    raise InvalidRequest("the form's parts must have names")
                if part.name == "file":
                    filename = (part.filename or "file.jsonl")[:_FIELD_BYTES]
                    await self._write(part, content)
                elif part.name in ("purpose", *_IGNORED):
                    value = await part.read_chunk(_FIELD_BYTES)
                    fields[part.name] = value.decode("utf-8", "replace")
                else:
                    raise InvalidParameter(part.name, f"{part.name}: unknown field of the form")
        except ValueError as error:
            raise InvalidRequest(f"the form cannot be read: {error}") from None
        return fields, filename

    async def _write(self, part: BodyPartReader, content: Path) -> None:
        files = self._service.storage.files
        size, max_bytes = 0, files.bounds.file_bytes
        with open(content, "wb", opener=private) as file:
            while piece := await part.read_chunk(_PIECE_BYTES):
                size += len(piece)
                if size > max_bytes:
                    raise web.HTTPRequestEntityTooLarge(
                        max_bytes, size, text=f"a file has at most {max_bytes} bytes"
                    )
                files.grow(content, owner(), size)
                file.write(piece)
