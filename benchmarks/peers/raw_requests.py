"""Ourselves, asked for one completion at a time over the native interface.

Each request is a branch of its own that holds the whole prompt as token ids: nothing tells the
runtime that requests belong together. Tokens are streamed, so that the first one is timed where the
client has it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from benchmarks.peers.drive import News
from benchmarks.peers.workloads import Request, Tokens
from rootlace.client.endpoint import RuntimeEndpoint
from rootlace.wire import protocol
from rootlace.wire.errors import from_code


class RawRequests:
    """An `OnlineEngine` over a connection to a gateway."""

    replies_are_ids = True

    def __init__(self, endpoint: RuntimeEndpoint) -> None:
        self._endpoint = endpoint
        self._connection = endpoint.connect()
        self._news: queue.SimpleQueue[News | Exception] = queue.SimpleQueue()
        self._cached = 0

    def reset(self) -> None:
        self._endpoint.flush_cache()
        self._cached = 0

    def cached(self) -> int:
        return self._cached

    def add(self, request: Request) -> None:
        connection = self._connection
        branch = connection.next_branch()
        params = protocol.SamplingParams(
            temperature=0.0, max_tokens=request.wanted, ignore_eos=True
        )
        receiver = _Receiver(request.name, self)
        for op in (
            protocol.Open(connection.next_op(), branch, program=connection.next_program()),
            protocol.Append(
                connection.next_op(), branch, (protocol.Tokens(tuple(request.prompt)),)
            ),
            protocol.Generate(connection.next_op(), branch, params=params, stream=True),
            protocol.Close(connection.next_op(), branch),
        ):
            connection.send(op, receiver)

    def step(self) -> Sequence[News]:
        self._connection.flush()
        found = [self._news.get()]
        while not self._news.empty():
            found.append(self._news.get())
        news = []
        for one in found:
            if isinstance(one, Exception):
                raise one
            news.append(one)
        return news

    def tell(self, news: News | Exception) -> None:
        self._news.put(news)

    def count_cached(self, tokens: int) -> None:
        self._cached += tokens


class _Receiver:
    """The sink of one request's operations; called in the connection's thread."""

    def __init__(self, name: str, engine: RawRequests) -> None:
        self._name = name
        self._engine = engine
        self._told = 0

    def __call__(self, event: protocol.Event) -> None:
        if isinstance(event, protocol.Chunk):
            self._tell(list(event.token_ids), False)
        elif isinstance(event, protocol.Generated):
            self._engine.count_cached(event.usage.cached_tokens)
            self._tell(list(event.outputs[0].token_ids)[self._told :], True)
        elif isinstance(event, protocol.Failed):
            self._engine.tell(from_code(event.code, event.message))

    def _tell(self, tokens: Tokens, finished: bool) -> None:
        self._told += len(tokens)
        self._engine.tell(News(self._name, tokens, finished, time.perf_counter()))
