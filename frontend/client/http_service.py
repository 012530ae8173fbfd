"""A service behind an HTTP address: JSON out, JSON or server-sent events in."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rootlace.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RootlaceError,
    ServerUnavailable,
    Unauthorized,
)

_KINDS: dict[int, type[RootlaceError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: InvalidRequest,
    413: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
    529: Overloaded,
}
# What reading another form of reply raises, or one that was cut off.
_BROKEN = (
    *(OSError, http.client.HTTPException),
    *(ValueError, LookupError, TypeError, AttributeError),
)


class HttpService:
    """Asks `url`; raises typed errors, whatever goes wrong."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **headers}

    def get(self, path: str, timeout: float) -> Any:
        with self._reading(timeout), self._open(path, None, timeout) as response:
            return json.load(response)

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        timeout: float,
        take: Callable[[dict[str, Any]], object],
    ) -> None:
        """Have `take` called with the reply or, where the body says "stream", with each event."""
        with self._reading(timeout), self._open(path, body, timeout) as response:
            for said in _events(response) if body.get("stream") else [json.load(response)]:
                take(said)

    @contextmanager
    def _reading(self, timeout: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise self._too_late(timeout) from None
        except _BROKEN as error:
            raise ServerUnavailable(f"{self.url} answered something else: {error!r}") from error

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, dict(self._headers))
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            kind = _KINDS.get(error.code, ServerUnavailable)
            raise kind(f"{self.url} answered {error.code}: {_reason(error)}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise self._too_late(timeout) from None
            raise ServerUnavailable(f"{self.url} does not answer: {error}") from None

    def _too_late(self, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.url} has not answered within {timeout:g} s")


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The server-sent events of a stream."""
    for line in response:
        if line.startswith(b"data:") and line[5:].strip() not in (b"", b"[DONE]"):
            event: dict[str, Any] = json.loads(line[5:])
            if "error" in event:
                raise ServerUnavailable(str(event["error"]))
            yield event


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        said = json.load(error)
        return str(said.get("error", said).get("message", said))
    except (OSError, ValueError, AttributeError):
        return str(error.reason)
