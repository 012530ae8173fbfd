"""Any server with OpenAI's completions interface: token ids as prompts, streamed answers."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peers.drive import News
from benchmarks.peers.peer_process import PeerError
from benchmarks.peers.workloads import Request

FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")
"""Ours and sglang's; vLLM's (in its development mode)."""

Body = dict[str, Any]


class UrlPeer:
    """An `OnlineEngine` behind `url`, for instance http://127.0.0.1:8000.

    Servers that tell the ids of what they generate (`return_token_ids`) get these back in
    follow-ups; for others see `replies_are_ids`. `can_flush`: whether its cache can be emptied;
    where not, only a new seed makes a cold run. Raises PeerError when nobody answers.
    """

    def __init__(self, name: str, url: str, api_key: str = "", timeout: float = 600.0) -> None:
        self.name = name
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._news: queue.SimpleQueue[News | Exception] = queue.SimpleQueue()
        self._cached: int | None = 0
        self.model: str = self._first_model()
        self._extra, self.replies_are_ids = self._find_out()
        self.can_flush = self._flush()

    def reset(self) -> None:
        if self.can_flush:
            self._flush()
        self._cached = 0

    def cached(self) -> int | None:
        """None if the server does not tell."""
        return self._cached

    def add(self, request: Request) -> None:
        threading.Thread(target=self._ask, args=(request,), daemon=True).start()

    def step(self) -> Sequence[News]:
        news = self._news.get()
        if isinstance(news, Exception):
            raise PeerError(f"{self.name}: {news}") from news
        return [news]

    # ------------------------------------------------------------ one request

    def _body(self, prompt: Sequence[int], wanted: int, extra: Mapping[str, Any]) -> Body:
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": wanted,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    def _ask(self, request: Request) -> None:
        try:
            self._stream(request)
        except Exception as error:
            self._news.put(error)

    def _stream(self, request: Request) -> None:
        """Tell the first token when it comes, and the rest at the end."""
        connection = self._connect()
        ids: list[int] = []
        usage: Body = {}
        told = False
        try:
            body = self._body(request.prompt, request.wanted, self._extra)
            response = self._post(connection, body)
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise PeerError(str(event["error"])[:300])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    ids += choice.get("token_ids") or ()
                    # A token that is half a character has no text yet, but an event.
                    if not told and (ids or not self.replies_are_ids):
                        told = True
                        first = ids[:1] if self.replies_are_ids else [0]
                        self._news.put(News(request.name, first, False, time.perf_counter()))
        finally:
            connection.close()
        count = usage.get("completion_tokens", request.wanted)
        reply = ids if self.replies_are_ids else [0] * count
        self._count_cached(usage)
        rest = reply[1:] if told else reply
        self._news.put(News(request.name, rest, True, time.perf_counter()))

    def _count_cached(self, usage: Body) -> None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None or self._cached is None:
            self._cached = None
        else:
            self._cached += cached

    # ------------------------------------------------------------ the server

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout)

    def _post(self, connection: http.client.HTTPConnection, body: Body) -> http.client.HTTPResponse:
        path = f"{self._base}/v1/completions"
        connection.request("POST", path, json.dumps(body), self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise PeerError(f"{response.status}: {response.read(300).decode(errors='replace')}")
        return response

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            connection.request("GET", f"{self._base}/v1/models", headers=self._headers)
            models = json.load(connection.getresponse())
            return str(models["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise PeerError(
                f"{self.name}: no model at {self._host}:{self._port}: {error}"
            ) from None
        finally:
            connection.close()

    def _find_out(self) -> tuple[Body, bool]:
        """(fields to ask with, whether answers hold ids): not every server takes every field."""
        refused = ""
        for extra in ({"return_token_ids": True}, {}):
            connection = self._connect()
            try:
                body = self._body([100, 101, 102], 2, extra)
                events = [
                    json.loads(line[5:])
                    for line in self._post(connection, body)
                    if line.startswith(b"data: {")
                ]
            except PeerError as error:
                refused = str(error)
                continue
            finally:
                connection.close()
            ids = [
                t for e in events for c in e.get("choices", ()) for t in c.get("token_ids") or ()
            ]
            return dict(extra), len(ids) == 2
        raise PeerError(f"{self.name}: {refused}")

    def _flush(self) -> bool:
        for path in FLUSH_PATHS:
            connection = self._connect()
            try:
                connection.request("POST", f"{self._base}{path}", headers=self._headers)
                if connection.getresponse().status == 200:
                    return True
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
        return False
