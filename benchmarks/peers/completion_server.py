"""A server that completes prompts of token ids over HTTP and streams the output.

Standard library only: drivers of peers use this file, too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.drive import News, PeerError
from benchmarks.peers.workloads import FIRST_PLAIN_TOKEN, Request

FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")
"""Ours and sglang's; vLLM's (in its development mode)."""

Body = dict[str, Any]

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy between us and what is measured."""


@dataclass
class Answer:
    """A server's reports of one request. `count`: tokens that it says it generated."""

    ids: list[int] = field(default_factory=list)
    count: int = 0
    cached: int | None = None


class CompletionServer:
    """An `OnlineEngine` behind `url`: one thread and one connection per request.

    Subclasses know the form of requests and events (`path`, `body`, `read`).
    """

    path = ""
    replies_are_ids = True

    def __init__(self, name: str, url: str, timeout: float = 600.0) -> None:
        self.name = name
        self.url = (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._news: queue.SimpleQueue[News | Exception] = queue.SimpleQueue()
        self._cached: int | None = 0

    def body(self, prompt: Sequence[int], wanted: int) -> Body:
        """Return the body that asks for exactly `wanted` tokens, greedily, as a stream."""
        raise NotImplementedError

    def read(self, event: Body, answer: Answer) -> None:
        """Add an event of the stream to `answer`."""
        raise NotImplementedError

    def reset(self) -> None:
        self._cached = 0

    def cached(self) -> int | None:
        """Return cached tokens; None if the server does not report them."""
        return self._cached

    def add(self, request: Request) -> None:
        threading.Thread(target=self._ask, args=(request,), daemon=True).start()

    def step(self) -> Sequence[News]:
        news = self._news.get()
        if isinstance(news, Exception):
            raise PeerError(f"{self.name}: {news}") from news
        return [news]

    def _ask(self, request: Request) -> None:
        try:
            self._stream(request)
        except Exception as error:
            self._news.put(error)

    def _stream(self, request: Request) -> None:
        """Report the first token when it comes, and the rest at the end."""
        answer = Answer(count=request.wanted)
        told = 0
        for event in self.events(self.body(request.prompt, request.wanted)):
            self.read(event, answer)
            # A token that is half a character has an event, but no text yet.
            if not told and (answer.ids or not self.replies_are_ids):
                first = answer.ids[:1] or [FIRST_PLAIN_TOKEN]
                self._news.put(News(request.name, first, False, time.perf_counter()))
                told = 1
        if answer.cached is None or self._cached is None:
            self._cached = None
        else:
            self._cached += answer.cached
        # Tokens that were not streamed (the end of half a character) get stand-in ids.
        reply = answer.ids + [FIRST_PLAIN_TOKEN] * (answer.count - len(answer.ids))
        self._news.put(News(request.name, reply[told:], True, time.perf_counter()))

    def open(self, path: str, body: Body | None = None, method: str = "POST") -> Any:
        """Open the response. Raises OSError, HTTPError for a status other than 200."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        return DIRECT.open(request, timeout=self._timeout)

    def events(self, body: Body) -> Iterator[Body]:
        """Yield the events of a completion. Raises PeerError."""
        try:
            with self.open(self.path, body) as response:
                for line in response:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        event = json.loads(line[5:])
                        if "error" in event:
                            raise PeerError(str(event["error"])[:300])
                        yield event
        except urllib.error.HTTPError as error:
            raise PeerError(f"{error.code}: {error.read(300).decode(errors='replace')}") from None


class LlamaServer(CompletionServer):
    """llama.cpp's server, by its own interface: OpenAI's has no token ids."""

    path = "/completion"

    def body(self, prompt: Sequence[int], wanted: int) -> Body:
        return {
            "prompt": list(prompt),
            "n_predict": wanted,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
        }

    def read(self, event: Body, answer: Answer) -> None:
        answer.ids += event.get("tokens") or ()
        if event.get("stop"):
            answer.count = event["tokens_predicted"]
            answer.cached = event["timings"]["cache_n"]


class OpenAIServer(CompletionServer):
    """Any server with OpenAI's completions interface, for instance http://127.0.0.1:8000.

    Follow-ups contain the generated ids if the server returns these (`return_token_ids`); for
    others see `replies_are_ids`. `can_flush`: whether its cache can be emptied; if not, only a new
    seed makes a cold run. Raises PeerError when no server answers.
    """

    path = "/v1/completions"

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name, url)
        self.model = self._first_model()
        self._extra: Body = {}
        self._find_out()
        self.can_flush = self._flush()

    def body(self, prompt: Sequence[int], wanted: int) -> Body:
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": wanted,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }

    def read(self, event: Body, answer: Answer) -> None:
        usage = event.get("usage") or {}
        answer.count = usage.get("completion_tokens", answer.count)
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens", answer.cached)
        for choice in event.get("choices", ()):
            answer.ids += choice.get("token_ids") or ()

    def reset(self) -> None:
        if self.can_flush:
            self._flush()
        super().reset()

    def _first_model(self) -> str:
        try:
            with self.open("/v1/models", method="GET") as response:
                return str(json.load(response)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise PeerError(f"{self.name}: no model at {self.url}: {error}") from None

    def _find_out(self) -> None:
        """Find out whether answers can have ids: some servers refuse the field for ids."""
        for last, extra in enumerate(({"return_token_ids": True}, {})):
            self._extra, answer = dict(extra), Answer()
            try:
                for event in self.events(self.body([100, 101, 102], 2)):
                    self.read(event, answer)
            except PeerError as error:
                if last:
                    raise PeerError(f"{self.name}: {error}") from None
            else:
                break
        self.replies_are_ids = len(answer.ids) == 2

    def _flush(self) -> bool:
        for path in FLUSH_PATHS:
            with contextlib.suppress(OSError, http.client.HTTPException), self.open(path):
                return True
        return False
