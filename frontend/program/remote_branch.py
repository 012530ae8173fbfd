"""A branch on the server: opened, told its operations in order, closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from rootlace.client.channel import Completion
from rootlace.language.failures import Failure, call_site
from rootlace.program.operations import Operation, Quoting
from rootlace.program.run import PrefixMatcher, ProgramRun
from rootlace.wire import protocol
from rootlace.wire.errors import Cancelled, InvalidRequest, RootlaceError


class _Ignored(Completion):
    """The sink of a close or cancel: nobody cares whether it failed."""

    __slots__ = ()

    def __call__(self, event: protocol.Event) -> None:
        self.finish()


class RemoteBranch:
    """Sends a branch's operations and keeps its first failure; never waits for the server.

    Used by one thread (or loop) at a time, besides the I/O thread that reports events.
    """

    def __init__(
        self, run: ProgramRun, parent: RemoteBranch | None = None, adapter: str | None = None
    ) -> None:
        """`adapter` None: the parent's, or the run's."""
        self.id = run.connection.next_branch()
        self.failure: Failure | None = None
        self.last: Operation | None = None
        self.closed = ""
        self._run = run
        self._parent = parent
        self._adapter = run.adapter if parent is None else adapter
        self._opened = False
        self._matcher: PrefixMatcher | None = None
        self._abandoned = False
        self._stands = False  # a state went back to it
        self._left_for: int | None = None  # the mark that the state went back to
        self._children = 0
        self._quoting: list[Quoting] = []
        run.adopt(self)
        run.recording.open(self.id, None if parent is None else parent.id)
        if parent is not None:
            parent.ensure_open()
            parent._children += 1
            self._open(parent.id)
        elif run.prefix is not None:
            self._matcher = PrefixMatcher(run.prefix)

    # ------------------------------------------------------------ sending

    def ensure_open(self) -> None:
        """Open it on the server, if that waited for the branch's first text."""
        if not self._opened:
            held = self._matcher.give_up() if self._matcher else ()
            self._matcher = None
            self._open(None)
            if held:
                self._append(held)

    def append(self, parts: tuple[protocol.Part, ...]) -> None:
        """Send text and tokens; the first text may be held back to find a shared prefix."""
        if self._matcher is not None:
            matches, parts = self._matcher.feed(parts)
            if matches is None:
                return
            parent = self._matcher.prefix.branch if matches else None
            self._matcher = None
            self._open(parent)
        else:
            self.ensure_open()
        if parts:
            self._append(parts)

    def quote(self, sources: Sequence[RemoteBranch]) -> None:
        """Append what `sources` have gained since they were opened, without waiting for it."""
        self.ensure_open()
        operation = Quoting(self, call_site(), sources)
        for source in sources:
            source._quoting.append(operation)
        parts = tuple(protocol.Quote(source.id) for source in sources)
        self.issue(protocol.Append(self.next_op(), self.id, parts), operation)

    def next_op(self) -> int:
        return self._run.connection.next_op()

    def issue(self, op: protocol.Op, operation: Operation) -> None:
        """Send `op`, whose events `operation` gets. Raises ProgramError if it cannot be sent."""
        self.last = operation
        try:
            self._run.connection.send(op, operation)
        except InvalidRequest as error:
            self._refuse(operation, error)
        if self._run.cancelled:  # the canceller may not have seen this branch's latest operation
            self.cancel()

    def check_open(self) -> None:
        """Raise Cancelled or InvalidRequest where nothing can be appended any more."""
        if self._run.cancelled:
            raise Cancelled("the program was cancelled")
        if self.closed:
            raise InvalidRequest(f"{self.closed}: its state can be read, but not appended to")

    def _open(self, parent: int | None) -> None:
        self._opened = True
        program = self._run.program if parent is None else ""
        op = protocol.Open(
            self.next_op(),
            self.id,
            parent=parent,
            program=program,
            adapter=self._adapter,
            share=self._run.share,
        )
        self.issue(op, Operation(self, call_site(), "opening a branch"))

    def _append(self, parts: tuple[protocol.Part, ...]) -> None:
        op = protocol.Append(self.next_op(), self.id, parts)
        self.issue(op, Operation(self, call_site(), "appending text"))

    def _refuse(self, operation: Operation, error: InvalidRequest) -> NoReturn:
        """End `operation`, which cannot be sent, as the server ends one that fails."""
        operation.failure = failure = self.failed(operation, error)
        operation.finish()
        # What follows would continue a text without this operation: the branch is broken.
        self._run.connection.send(protocol.Cancel(self.next_op(), self.id), _Ignored())
        raise failure.exception()

    # ------------------------------------------------------------ what the I/O thread reports

    def failed(self, operation: Operation, error: RootlaceError) -> Failure:
        """The failure that readers of `operation` see: the first that led to it, in any branch."""
        if self.failure is None:
            self.failure = self._inherited(operation, error)
        if self.failure is None:
            self.failure = Failure(operation.site, operation.what, error)
            if not self._abandoned:
                self._run.note(self)
        return self.failure

    def _inherited(self, operation: Operation, error: RootlaceError) -> Failure | None:
        if isinstance(operation, Quoting):
            for source in operation.sources:
                if source.failure is not None:
                    return source.failure
        if isinstance(error, Cancelled) and self._parent is not None:
            return self._parent.failure
        return None

    def notify(self) -> None:
        """Wake those who follow the run's stream."""
        if self._run.stream:
            self._run.signal.fire()

    # ------------------------------------------------------------ the end

    def close(self, why: str = "the program has ended") -> None:
        """Give the branch back once its operations are over. What it said stays readable."""
        if self.closed:
            return
        self.closed = why
        self._run.release(self, self._abandoned)
        if self._opened:
            self._send_close()

    def cancel(self) -> None:
        """Abort what runs and what is queued. From any thread."""
        if self._opened and self.last is not None and not self.last.done:
            self._run.connection.send(protocol.Cancel(self.next_op(), self.id), _Ignored())

    def drop(self) -> None:
        """Nobody holds the branch any more (called by the garbage collector)."""
        if not self.closed and not self._run.ended.done:
            self._abandoned = True
            if not self._children and not self._quoting:
                self.cancel()
            self.close("this fork was dropped")

    @property
    def taken_back(self) -> bool:
        """Whether it was opened below a branch that was left, and after the mark."""
        branch = self
        while branch._parent is not None and not branch._stands:
            left_for = branch._parent._left_for
            if left_for is not None and branch.id > left_for:  # ids grow
                return True
            branch = branch._parent
        return False

    def leave(self, other: RemoteBranch, mark: RemoteBranch) -> None:
        """The state goes back to `mark`, and on from there in `other`."""
        other._stands = True
        self._stands, self._left_for = False, mark.id

    def abandon(self) -> None:
        """The program wants nothing more of the branch, nor to hear of its failures."""
        self.drop()
        if self.failure is not None:
            self.failure.seen = True

    def _send_close(self) -> None:
        # A branch must live until those that quote it have got its text.
        for operation in self._quoting:
            if not operation.done:
                operation.add_callback(self._send_close)
                return
        self._run.connection.send(protocol.Close(self.next_op(), self.id), _Ignored())
