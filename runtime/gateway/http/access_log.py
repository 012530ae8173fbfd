"""The access log: one message per reply."""

from __future__ import annotations

import logging

from aiohttp.abc import AbstractAccessLogger
from aiohttp.web import BaseRequest, RequestKey, StreamResponse

from rootlace.runtime.gateway.http.request_id import HEADER
from rootlace.runtime.gateway.http.source import address_of

KEY_NAME = RequestKey("key_name", str)
"""The name of the API key of a request, where it has one of the file's."""


class AccessLogger(AbstractAccessLogger):
    """Who asked for what, the status, and how long it took; no body and no query, which could hold
    prompts or keys."""

    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.INFO)

    def log(self, request: BaseRequest, response: StreamResponse, time: float) -> None:
        fields = {
            "client": address_of(request),
            "key": request.get(KEY_NAME, "-"),
            "method": request.method,
            "path": request.rel_url.raw_path,
            "status": response.status,
            "bytes": response.body_length,
            "seconds": round(time, 6),
            "request_id": response.headers.get(HEADER, "-"),
            "user_agent": request.headers.get("User-Agent", "-"),
        }
        self.logger.info(
            '%(client)s %(key)s "%(method)s %(path)s" %(status)s %(bytes)s %(seconds)ss '
            '%(request_id)s "%(user_agent)s"',
            fields,
            extra={"fields": fields},
        )
