"""One-shot branches: how an HTTP request uses the gateway.

A request is a session of its own that opens one branch per prompt, appends the prompt, generates
and closes: the same path that programs take.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rootlace.runtime.gateway.branches.gateway import Gateway
from rootlace.runtime.gateway.http.constraints import Asked
from rootlace.runtime.gateway.http.errors import RefusedConstraint
from rootlace.runtime.gateway.keys.account import admitted
from rootlace.wire.errors import DeadlineExceeded, InvalidConstraint, RootlaceError, from_code
from rootlace.wire.protocol import (
    Append,
    Cancel,
    Chunk,
    Close,
    Event,
    Failed,
    Generate,
    Generated,
    Op,
    Open,
    Output,
    Part,
    SamplingParams,
    Usage,
)

_OPS_PER_JOB = 4


@dataclass(frozen=True)
class Job:
    """One prompt and how to continue it."""

    parts: tuple[Part, ...]
    params: SamplingParams
    asked: Asked | None = None
    namespace: str = ""
    cache_report: bool = False
    adapter: str = ""
    timeout: float | None = None
    """Seconds from now until the request fails with DeadlineExceeded."""


class OneShots:
    """Jobs under way. Leaving the `with` block cancels what still runs.

    Iterating gives `(index of the job, event)` as events arrive, the last of each job being its
    `Generated`, and raises the error of the first job that fails.
    """

    def __init__(self, gateway: Gateway, jobs: Sequence[Job], stream: bool = False) -> None:
        self._events: asyncio.Queue[list[Event]] = asyncio.Queue()
        self._jobs = jobs
        self._timeout = min((job.timeout for job in jobs if job.timeout is not None), default=None)
        self._clock = asyncio.get_running_loop().time
        self._deadline = None if self._timeout is None else self._clock() + self._timeout
        self._session = gateway.open_session(
            self._events.put_nowait, client="http", account=admitted()
        )
        self._next_op = len(jobs) * _OPS_PER_JOB + 1
        self._ended: set[int] = set()
        ops: list[Op] = []
        for index, job in enumerate(jobs):
            op, branch = index * _OPS_PER_JOB + 1, index + 1
            ops += [
                Open(op, branch, namespace=job.namespace, adapter=job.adapter),
                Append(op + 1, branch, job.parts),
                Generate(
                    op + 2,
                    branch,
                    params=job.params,
                    constraint=job.asked.constraint if job.asked else None,
                    stream=stream,
                    cache_report=job.cache_report,
                    tell_cached=stream,
                ),
                Close(op + 3, branch),
            ]
        self._session.handle(ops)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.close()

    def abort(self, index: int) -> None:
        """End one job: its outputs are empty ones, ended by "abort"."""
        output = Output("", (), "abort")
        outputs = (output,) * self._jobs[index].params.n
        # It comes before the failure of the operation, which then is that of an ended job.
        generate = index * _OPS_PER_JOB + 3
        self._events.put_nowait([Generated(generate, outputs, Usage())])
        self._session.handle([Cancel(self._next_op, index + 1)])
        self._next_op += 1

    async def results(self) -> list[Generated]:
        """The results in the order of the jobs."""
        found = {index: event async for index, event in self if isinstance(event, Generated)}
        return [found[index] for index in range(len(self._jobs))]

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk | Generated]]:
        while len(self._ended) < len(self._jobs):
            for event in await self._next():
                index = (event.op - 1) // _OPS_PER_JOB
                if index in self._ended or index >= len(self._jobs):
                    continue
                if isinstance(event, Failed):
                    raise self._error(event, index)
                if isinstance(event, Chunk | Generated):
                    if isinstance(event, Generated):
                        self._ended.add(index)
                    yield index, event

    async def _next(self) -> list[Event]:
        if self._deadline is None:
            return await self._events.get()
        try:
            # A queue that is never empty would let the timeout pass unseen.
            if self._clock() >= self._deadline:
                raise TimeoutError
            async with asyncio.timeout_at(self._deadline):
                return await self._events.get()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request was not done within its timeout of {self._timeout:g} s"
            ) from None

    def _error(self, event: Failed, index: int) -> RootlaceError:
        """The typed error; one about the constraint names the field that asked for it."""
        where = f"prompt {index}: " if len(self._jobs) > 1 and event.op > 0 else ""
        error = from_code(event.code, where + event.message)
        asked = self._jobs[index].asked if event.op > 0 else None
        if isinstance(error, InvalidConstraint) and asked is not None:
            return RefusedConstraint(asked.param, str(error))
        return error


async def run(gateway: Gateway, jobs: Sequence[Job]) -> list[Generated]:
    """The results in the order of the jobs. Raises the error of the first job that fails."""
    with OneShots(gateway, jobs) as shots:
        return await shots.results()
