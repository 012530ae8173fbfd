"""A branch of a running program: what it has appended, as text and as operations."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rootlace.language.expressions import Appendable
from rootlace.language.saved import Saved
from rootlace.language.tool_calls import Offer, ToolCall
from rootlace.language.transcript import Conversation, Transcript
from rootlace.language.variables import Constant, Gathered, Readable
from rootlace.program.reader import BranchReader
from rootlace.program.remote_branch import RemoteBranch
from rootlace.program.run import ProgramRun
from rootlace.program.writer import BranchWriter
from rootlace.timeline.spans import Timeline
from rootlace.wire.errors import InvalidRequest


class Branch:
    """What a state stands on: written to, read, forked and joined. Never waits for the server."""

    def __init__(
        self, run: ProgramRun, parent: Branch | None = None, adapter: str | None = None
    ) -> None:
        self.run = run
        self.remote: RemoteBranch = RemoteBranch(run, parent.remote if parent else None, adapter)
        self.transcript: Transcript = Transcript(parent.transcript if parent else None)
        self.conversation: Conversation = parent.conversation.copy() if parent else Conversation()
        self.variables: dict[str, Readable] = dict(parent.variables) if parent else {}
        self.defaults: Mapping[str, Any] = parent.defaults if parent else run.defaults
        self._attach()
        self._start = self.transcript.start
        self._caller: Branch | None = None
        self._became: Branch | None = None

    def _attach(self) -> None:
        """Have a reader and a writer of what the branch holds now."""
        held = self.run, self.remote, self.transcript, self.conversation, self.variables
        self.reader = BranchReader(*held)
        self._writer = BranchWriter(*held, self.defaults)

    def append(self, expression: Appendable) -> None:
        self._writer.append(expression)

    def fork(self, size: int, adapter: str | None = None) -> list[Branch]:
        """`size` branches that start where this one stands, with its adapter or another one."""
        self.remote.check_open()
        forks = [Branch(self.run, self, adapter) for _ in range(size)]
        for fork in forks:
            # A fork that the program lets go of is given back, whatever it still does.
            weakref.finalize(fork, fork.remote.drop).atexit = False
        return forks

    def mark(self) -> Branch:
        if self.run.stream:
            raise InvalidRequest("what has been streamed cannot be taken back: try it in a fork")
        return self.fork(1)[0]

    def go_back(self, mark: Branch) -> None:
        left, other = self.remote, mark.mark()
        left.leave(other.remote, mark.remote)
        self.become(other)

    def become(self, other: Branch) -> None:
        left = self.remote
        branch: Branch | None = self
        while branch is not None:  # those whose programs called this one stand there, too
            branch.remote = other.remote
            branch.transcript = other.transcript
            branch.conversation = other.conversation
            branch._became = other  # whose end would give the branch back
            branch._attach()
            branch = branch._caller
        self.variables.clear()
        self.variables.update(other.variables)
        left.abandon()

    def drop(self) -> None:
        self.remote.abandon()

    def take_offer(self) -> Offer | None:
        offer, self.conversation.offer = self.conversation.offer, None
        return offer

    def called(self, call: ToolCall) -> None:
        self.run.recording.called(self.remote.id, call)

    def timeline(self) -> Timeline:
        run = self.run
        return run.recording.timeline(run.name, run.connection.model.name, run.error)

    def scope(self, name: str, defaults: Mapping[str, Any]) -> Branch:
        inner = copy.copy(self)
        inner.variables = {}
        inner.defaults = {**self.defaults, **defaults}
        inner._attach()
        inner._caller = self  # a fork is given back when nobody holds it any more
        return inner

    def join(self, forks: Sequence[Branch], mode: str) -> None:
        """End `forks` and bring back their variables, or their texts. Nothing is waited for."""
        if mode == "gather_variable":
            self._gather(forks)
        else:
            self._quote(forks)
        for fork in forks:
            fork.remote.close("this fork was joined")

    def _gather(self, forks: Sequence[Branch]) -> None:
        found: dict[str, list[Readable]] = {}
        for fork in forks:
            for name, variable in fork.variables.items():
                if name not in self.variables:
                    found.setdefault(name, []).append(variable)
        for name, parts in found.items():
            self.variables[name] = Gathered(parts)

    def _quote(self, forks: Sequence[Branch]) -> None:
        self.remote.check_open()
        if any(fork.transcript.start != fork._start for fork in forks):
            raise InvalidRequest(
                "join(): what a fork holds from before a rollback or a choice cannot be quoted; "
                "append its text(), or gather its variables"
            )
        self.remote.quote([fork.remote for fork in forks])
        for fork in forks:
            self.transcript.append(fork.transcript.excerpt(fork.transcript.start))

    def position(self) -> int:
        return len(self.transcript)

    def name_from(self, position: int, name: str) -> None:
        self.variables[name] = self.transcript.excerpt(position)

    def set_variable(self, name: str, value: object) -> None:
        self.variables[name] = Constant(value)

    def saved(self) -> Saved:
        variables = {name: variable.saved() for name, variable in self.variables.items()}
        pieces = tuple(self.transcript.excerpt().pieces())
        return Saved(self.run.connection.model.path, pieces, variables)

    def restore(self, saved: Saved) -> None:
        self._writer.restore(saved.pieces, saved.model)
        self.variables.update(saved.variables)
