"""Any server with OpenAI's completions interface: token ids as prompts, streamed answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.peers.drive import News
from benchmarks.peers.peer_process import PeerError
from benchmarks.peers.workloads import Request

FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")
"""Ours and sglang's; vLLM's (in its development mode)."""

Body = dict[str, Any]

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy between us and what is measured."""


class UrlPeer:
    """An `OnlineEngine` behind `url`, for instance http://127.0.0.1:8000.

    Servers that tell the ids of what they generate (`return_token_ids`) get these back in
    follow-ups; for others see `replies_are_ids`. `can_flush`: whether its cache can be emptied;
    where not, only a new seed makes a cold run. Raises PeerError when nobody answers.
    """

    def __init__(self, name: str, url: str, api_key: str = "", timeout: float = 600.0) -> None:
        self.name = name
        self._base = (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
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
        ids: list[int] = []
        usage: Body = {}
        told = False
        for event in self._events(self._body(request.prompt, request.wanted, self._extra)):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                ids += choice.get("token_ids") or ()
                # A token that is half a character has no text yet, but an event.
                if not told and (ids or not self.replies_are_ids):
                    told = True
                    first = ids[:1] if self.replies_are_ids else [0]
                    self._news.put(News(request.name, first, False, time.perf_counter()))
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

    def _open(self, path: str, body: Body | None = None, method: str = "POST") -> Any:
        """The response, to be read or closed. Raises OSError, HTTPError for what is not 200."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers, method=method)
        return DIRECT.open(request, timeout=self._timeout)

    def _events(self, body: Body) -> Iterator[Body]:
        """What the server streams of a completion. Raises PeerError."""
        try:
            with self._open("/v1/completions", body) as response:
                for line in response:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        event = json.loads(line[5:])
                        if "error" in event:
                            raise PeerError(str(event["error"])[:300])
                        yield event
        except urllib.error.HTTPError as error:
            raise PeerError(f"{error.code}: {error.read(300).decode(errors='replace')}") from None

    def _first_model(self) -> str:
        try:
            with self._open("/v1/models", method="GET") as response:
                return str(json.load(response)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise PeerError(f"{self.name}: no model at {self._base}: {error}") from None

    def _find_out(self) -> tuple[Body, bool]:
        """(fields to ask with, whether answers hold ids): not every server takes every field."""
        refused = ""
        for extra in ({"return_token_ids": True}, {}):
            try:
                events = list(self._events(self._body([100, 101, 102], 2, extra)))
            except PeerError as error:
                refused = str(error)
                continue
            choices = [choice for event in events for choice in event.get("choices", ())]
            ids = [token for choice in choices for token in choice.get("token_ids") or ()]
            return dict(extra), len(ids) == 2
        raise PeerError(f"{self.name}: {refused}")

    def _flush(self) -> bool:
        for path in FLUSH_PATHS:
            with contextlib.suppress(OSError, http.client.HTTPException), self._open(path):
                return True
        return False
