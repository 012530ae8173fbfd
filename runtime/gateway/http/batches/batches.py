"""OpenAI's `/v1/batches`: many requests in a file."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from typing import Annotated, Any

from aiohttp import web

from rootlace.runtime.gateway.http.batches.batch import Batch
from rootlace.runtime.gateway.http.batches.disk import room_needed
from rootlace.runtime.gateway.http.batches.paging import PageQuery, page
from rootlace.runtime.gateway.http.batches.service import BatchService, owner
from rootlace.runtime.gateway.http.body import Body, raw_body, read_body
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import ignored
from rootlace.runtime.gateway.http.query import read_query
from rootlace.runtime.gateway.http.replies import json_response
from rootlace.runtime.gateway.keys.account import caller
from rootlace.runtime.gateway.shares import kept_for_others
from rootlace.wire.errors import InvalidRequest, Overloaded

MAX_UNFINISHED = 100
_WINDOW = "24h"
_WINDOW_SECONDS = 24 * 3600


class BatchBody(Body, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str = _WINDOW
    metadata: dict[str, str] | None = None
    output_expires_after: Annotated[
        dict[str, Any] | None, ignored("files are kept for 30 days")
    ] = None


class Batches:
    """The handlers."""

    def __init__(self, service: BatchService) -> None:
        self._service = service

    async def create(self, request: web.Request) -> web.Response:
        body = await read_body(request, BatchBody)
        storage = self._service.storage
        storage.forget_old()
        if body.endpoint not in self._service.answers:
            known = ", ".join(self._service.answers)
            raise InvalidParameter("endpoint", f"endpoint must be one of {known}")
        if body.completion_window != _WINDOW:
            raise InvalidParameter("completion_window", f"completion_window must be {_WINDOW!r}")
        self._service.find(storage.files.records, body.input_file_id, "input_file_id")
        unfinished = [batch for batch in storage.batches.all() if batch.unfinished]
        account = caller()
        most = None if account is None else account.entry.max_batches
        owners = Counter(batch.owner for batch in unfinished)
        own, taken = owners.get(owner(), 0), len(unfinished)
        if most is not None and own >= most:
            raise Overloaded(f"the API key may have {most} unfinished batches (max_batches)")
        if taken >= MAX_UNFINISHED:
            raise Overloaded(f"{MAX_UNFINISHED} batches are unfinished")
        if owner() and kept_for_others(own, len(owners), taken, MAX_UNFINISHED):
            raise Overloaded(
                f"{own} batches of this API key are unfinished: the last of {MAX_UNFINISHED} are "
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
        with room_needed():
            storage.batches.put(batch)
        self._service.runner.wake()
        return json_response(batch)

    async def get(self, request: web.Request) -> web.Response:
        return json_response(self._batch(request))

    async def list(self, request: web.Request) -> web.Response:
        query = read_query(request, PageQuery)
        return json_response(page(query, self._service.visible(self._service.storage.batches), 20))

    async def cancel(self, request: web.Request) -> web.Response:
        await raw_body(request)
        batch = self._batch(request)
        if not batch.unfinished:
            raise InvalidRequest(f"the batch is {batch.status} and cannot be cancelled")
        self._service.runner.cancel(batch)
        return json_response(batch)

    def _batch(self, request: web.Request) -> Batch:
        return self._service.find(self._service.storage.batches, request.match_info["id"])
