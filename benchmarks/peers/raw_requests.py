"""Our runtime, asked for one completion at a time over the native interface.

Each request is a separate branch with the whole prompt as token ids, so the runtime is not told
that requests belong together. Tokens are streamed, so that the client can time the first one.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from benchmarks.peers.drive import News
from benchmarks.peers.workloads import Request
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
        told = 0

        def hear(event: protocol.Event) -> None:
            """Receive events; called in the connection's thread."""
            nonlocal told
            finished = isinstance(event, protocol.Generated)
            if isinstance(event, protocol.Failed):
                self._news.put(from_code(event.code, event.message))
                return
            if isinstance(event, protocol.Generated):
                self._cached += event.usage.cached_tokens
                tokens = list(event.outputs[0].token_ids)[told:]
            elif isinstance(event, protocol.Chunk):
                tokens = list(event.token_ids)
            else:
                return
            told += len(tokens)
            self._news.put(News(request.name, tokens, finished, time.perf_counter()))

        prompt = (protocol.Tokens(tuple(request.prompt)),)
        for op in (
            protocol.Open(connection.next_op(), branch, program=connection.next_program()),
            protocol.Append(connection.next_op(), branch, prompt),
            protocol.Generate(connection.next_op(), branch, params=params, stream=True),
            protocol.Close(connection.next_op(), branch),
        ):
            connection.send(op, hear)

    def step(self) -> Sequence[News]:
        self._connection.flush()
        found = [self._news.get()]
        while not self._news.empty():
            found.append(self._news.get())
        for one in found:
            if isinstance(one, Exception):
                raise one
        return [one for one in found if isinstance(one, News)]
