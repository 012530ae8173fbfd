"""Reading what a branch of a run holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rootlace.language.transcript import Conversation, StateText, Transcript
from rootlace.language.variables import Pending, Readable, unknown
from rootlace.program.cursor import Cursor, TextCursor, VariableCursor, follow, follow_async
from rootlace.program.remote_branch import RemoteBranch
from rootlace.program.run import ProgramRun


class BranchReader:
    """The reader of a `Branch`; see `rootlace.language.interpreter.Reader`."""

    def __init__(
        self,
        run: ProgramRun,
        remote: RemoteBranch,
        transcript: Transcript,
        conversation: Conversation,
        variables: Mapping[str, Readable],
    ) -> None:
        self._run = run
        self._remote = remote
        self._transcript = transcript
        self._conversation = conversation
        self._variables = variables

    @property
    def streams(self) -> bool:
        return self._run.stream

    def find(self, name: str) -> Readable:
        """The variable `name`; whoever follows a running program waits until it is named."""
        run, variables = self._run, self._variables
        if run.watched_from_outside() and name not in variables:
            run.wait_until(lambda: name in variables)
        found = variables.get(name)
        if found is None:
            if run.error is not None:
                raise run.error
            raise unknown(name, variables)
        return found

    def pending(self) -> tuple[Pending, ...]:
        if self._run.watched_from_outside():
            return (self._run.ended,)
        return () if self._remote.last is None else (self._remote.last,)

    def wait_for(self, pending: Iterable[Pending]) -> None:
        self._run.wait_for(pending)

    async def wait_for_async(self, pending: Iterable[Pending]) -> None:
        await self._run.wait_for_async(pending)

    def wait_for_any(self, pending: Sequence[Pending]) -> None:
        self._run.wait_for_any(pending)

    async def wait_for_any_async(self, pending: Sequence[Pending]) -> None:
        await self._run.wait_for_any_async(pending)

    def text(self) -> StateText:
        self._raise_failure()
        return StateText(self._transcript.excerpt().pieces())

    def messages(self) -> list[dict[str, str]]:
        self._raise_failure()
        return self._conversation.messages()

    def error(self) -> BaseException | None:
        if self._run.ended.done and self._run.error is not None:
            return self._run.error
        return None if self._remote.failure is None else self._remote.failure.exception()

    def follow(self, name: str | None) -> Iterator[str]:
        try:
            for text, _ in follow(self._run, self._cursor(name, with_meta=False)):
                if text:
                    yield text
        except KeyboardInterrupt:  # Ctrl-C while waiting for more
            self._run.cancel()
            raise

    async def follow_async(self, name: str | None, with_meta: bool) -> AsyncIterator[Any]:
        async for text, meta in follow_async(self._run, self._cursor(name, with_meta)):
            if with_meta:
                yield text, meta
            elif text:
                yield text

    def _cursor(self, name: str | None, with_meta: bool) -> Cursor:
        if name is None:
            return TextCursor(self._run, self._transcript, with_meta)
        return VariableCursor(self._run, self._variables, name, with_meta)

    def _raise_failure(self) -> None:
        if self._remote.failure is not None:
            raise self._remote.failure.exception()
