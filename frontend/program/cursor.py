"""Following a running program's text, or one variable's, from wherever the reader is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

from rootlace.client.channel import call_in_loop, wait_for_event
from rootlace.language.transcript import Piece, Transcript
from rootlace.language.variables import Readable
from rootlace.program.operations import Generation, logprob_meta
from rootlace.program.run import ProgramRun
from rootlace.wire import protocol

Step = tuple[str, dict[str, Any] | None]


class Cursor(Protocol):
    def read(self) -> tuple[list[Step], bool]:
        """What is new, as pairs of text and meta information, and whether it was the last."""
        ...


class _GenerationReader:
    """Reads one generation while it runs.

    Each chunk's meta information lists all tokens so far, so it is made only `with_meta`.
    """

    def __init__(self, generation: Generation, with_meta: bool) -> None:
        self._generation = generation
        self._with_meta = with_meta
        self._seen = 0
        self._length = 0
        self._ids: list[int] = []

    def read(self) -> tuple[list[Step], bool]:
        done = self._generation.done  # before reading: what comes later is for the next call
        steps: list[Step] = []
        for chunk in self._generation.chunks_from(self._seen):
            self._seen += 1
            self._length += len(chunk.text)
            if self._with_meta:
                if chunk.text or chunk.token_ids:
                    steps.append((chunk.text, self._meta(chunk)))
            elif chunk.text:
                steps.append((chunk.text, None))
        if done:
            metas = self._generation.meta()
            rest = self._generation.text()[self._length :]
            steps.append((rest, metas[0] if isinstance(metas, list) else metas))
        return steps, done

    def _meta(self, chunk: protocol.Chunk) -> dict[str, Any]:
        self._ids.extend(chunk.token_ids)
        meta: dict[str, Any] = {
            "finish_reason": None,
            "completion_tokens": len(self._ids),
            "output_ids": list(self._ids),
        }
        if chunk.logprobs:
            meta.update(logprob_meta("output", chunk.logprobs))
        return meta


def _read_whole(readable: Readable) -> tuple[list[Step], bool]:
    if not all(operation.done for operation in readable.requires()):
        return [], False
    meta = readable.meta()
    return [(str(readable.written()), meta if isinstance(meta, dict) else None)], True


class TextCursor:
    """The whole text of a branch, from its first piece."""

    def __init__(self, run: ProgramRun, transcript: Transcript, with_meta: bool = True) -> None:
        self._run = run
        self._transcript = transcript
        self._with_meta = with_meta
        self._index = 0
        self._reader: _GenerationReader | None = None

    def read(self) -> tuple[list[Step], bool]:
        ended = self._run.ended.done
        transcript = self._transcript
        steps: list[Step] = []
        for piece in transcript.slice(self._index, len(transcript)):
            new, finished = self._read_piece(piece)
            steps.extend(new)
            if not finished:
                return steps, False
            self._index += 1
            self._reader = None
        return steps, ended

    def _read_piece(self, piece: Piece) -> tuple[list[Step], bool]:
        if isinstance(piece, str):
            return [(piece, None)] if piece else [], True
        if isinstance(piece, Generation):
            if self._reader is None:
                self._reader = _GenerationReader(piece, self._with_meta)
            return self._reader.read()
        return _read_whole(piece)


class VariableCursor:
    """One variable, from the moment the program names it. If it never does, there is no text."""

    def __init__(
        self,
        run: ProgramRun,
        variables: Mapping[str, Readable],
        name: str,
        with_meta: bool = True,
    ) -> None:
        self._run = run
        self._variables = variables
        self._name = name
        self._with_meta = with_meta
        self._reader: _GenerationReader | None = None

    def read(self) -> tuple[list[Step], bool]:
        ended = self._run.ended.done
        if self._reader is None:
            variable = self._variables.get(self._name)
            if variable is None:
                return [], ended
            if not isinstance(variable, Generation):
                return _read_whole(variable)
            self._reader = _GenerationReader(variable, self._with_meta)
        return self._reader.read()


def follow(run: ProgramRun, cursor: Cursor) -> Iterator[Step]:
    """Yield text as it comes. At the end, raises what ended the program if it failed."""
    event = threading.Event()
    with closing(_steps(run, cursor, event.set)) as steps:
        for step in steps:
            if step is not None:
                yield step
            else:
                wait_for_event(event)
                event.clear()


async def follow_async(run: ProgramRun, cursor: Cursor) -> AsyncIterator[Step]:
    """The same without blocking the running event loop."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    with closing(_steps(run, cursor, lambda: call_in_loop(loop, event.set))) as steps:
        for step in steps:
            if step is not None:
                yield step
            else:
                await event.wait()
                event.clear()


def _steps(
    run: ProgramRun, cursor: Cursor, wake: Callable[[], object]
) -> Generator[Step | None, None, None]:
    """What is new; None where nothing is: go on once `wake` has been called."""
    run.signal.subscribe(wake)
    try:
        while True:
            steps, finished = cursor.read()
            yield from steps
            if finished:
                break
            run.connection.flush()
            yield None
    finally:
        run.signal.unsubscribe(wake)
    if run.ended.done and run.error is not None:
        raise run.error
