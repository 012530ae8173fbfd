"""OpenAI's `/v1/files`: what batches read and write."""

from __future__ import annotations

from pathlib import Path

from aiohttp import BodyPartReader, web

from rootlace.runtime.gateway.http.batches.disk import private, room_needed
from rootlace.runtime.gateway.http.batches.file_store import File
from rootlace.runtime.gateway.http.batches.paging import MAX_PAGE, Deleted, PageQuery, page
from rootlace.runtime.gateway.http.batches.service import BatchService, owner
from rootlace.runtime.gateway.http.body import in_time
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.query import read_query
from rootlace.runtime.gateway.http.replies import json_response
from rootlace.wire.errors import InvalidRequest

UPLOAD_SECONDS = 600.0
"""A file that has not come by then holds its connection, and what it has of the disk, no longer."""
_PIECE_BYTES = 2**16
_FIELD_BYTES = 1024
_IGNORED = ("expires_after[anchor]", "expires_after[seconds]")


class FilesQuery(PageQuery):
    """`purpose`: only files for it."""

    purpose: str = ""


class Files:
    """The handlers."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    async def upload(self, request: web.Request) -> web.Response:
        storage = self._service.storage
        storage.forget_old()
        content = storage.files.new_upload(owner())
        try:
            with room_needed():
                async with in_time(UPLOAD_SECONDS):
                    fields, filename = await self._receive(request, content)
                if filename is None:
                    raise InvalidParameter("file", "file is missing")
                if fields.get("purpose") != "batch":
                    raise InvalidParameter(
                        "purpose", "purpose must be 'batch': files are for batches"
                    )
                file = storage.files.add(content, filename, "batch", owner())
        finally:
            storage.files.drop(content)
        return json_response(file)

    async def list(self, request: web.Request) -> web.Response:
        query = read_query(request, FilesQuery)
        files = self._service.visible(self._service.storage.files.records)
        found = [file for file in files if query.purpose in ("", file.purpose)]
        return json_response(page(query, found, MAX_PAGE))

    async def get(self, request: web.Request) -> web.Response:
        return json_response(self._file(request))

    async def content(self, request: web.Request) -> web.StreamResponse:
        files = self._service.storage.files
        file = self._file(request)
        return web.FileResponse(files.path(file.id), headers={"Content-Type": "application/jsonl"})

    async def delete(self, request: web.Request) -> web.Response:
        storage = self._service.storage
        file = self._file(request)
        for batch in storage.batches.all():
            if batch.unfinished and batch.input_file_id == file.id:
                raise InvalidRequest(f"{batch.id} reads this file: cancel it first")
        storage.files.delete(file.id)
        return json_response(Deleted(file.id, "file"))

    def _file(self, request: web.Request) -> File:
        return self._service.find(self._service.storage.files.records, request.match_info["id"])

    async def _receive(
        self, request: web.Request, content: Path
    ) -> tuple[dict[str, str], str | None]:
        """The form's fields and the file's name; the file is written to `content`."""
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
        size, most = 0, files.bounds.file_bytes
        with open(content, "wb", opener=private) as file:
            while piece := await part.read_chunk(_PIECE_BYTES):
                size += len(piece)
                if size > most:
                    raise web.HTTPRequestEntityTooLarge(
                        most, size, text=f"a file has at most {most} bytes"
                    )
                files.grow(content, owner(), size)
                file.write(piece)
