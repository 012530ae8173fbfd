"""Requests that Serve's HTTP passes to the gateway's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from rootlace.runtime.server.http.connections import from_source


async def passed_to(
    client: aiohttp.ClientSession, address: str, request: Any, front_secret: str
) -> aiohttp.ClientResponse:
    """The gateway's answer to a request (Starlette's), whose body goes there as it comes: its size,
    and how much of all bodies there may be, are bounded there. The gateway is told whose address
    the request is from, as Serve's proxy says."""
    query = f"?{request.url.query}" if request.url.query else ""
    headers = request.headers
    body: AsyncIterator[bytes] | None = None
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        body = request.stream()
    source = "" if request.client is None else request.client.host
    return await client.request(
        request.method,
        f"{address}{request.url.path}{query}",
        headers=from_source(headers.items(), source, front_secret),
        data=body,
        allow_redirects=False,
    )
