"""What records amount to: the branches of each client, and the answers that it may not have."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from rootlace.runtime.gateway.state.records import (
    Begun,
    Emitted,
    Ended,
    Error,
    Finished,
    Grown,
    Heard,
    Opened,
    Quoted,
    Record,
    Segment,
    Told,
)
from rootlace.runtime.gateway.tokens.pieces import Piece
from rootlace.wire.protocol import Done, Event, encode


@dataclass
class KeptBranch:
    """`ids` are segments of int32; a fork shares those of its parent."""

    opened: Opened
    ids: list[bytes] = field(default_factory=list)
    pending: tuple[Piece, ...] = ()
    begin: bool | None = None
    gained: list[Piece | bytes] = field(default_factory=list)
    paid: int = 0
    broken: Error | None = None


@dataclass
class KeptSession:
    """One client. `answers` are frames by operation, which it has not said that it has; `told` and
    `quoted` are about operations that have not ended."""

    begun: Begun
    branches: dict[int, KeptBranch] = field(default_factory=dict)
    answers: dict[int, bytes] = field(default_factory=dict)
    told: dict[int, list[Told]] = field(default_factory=dict)
    quoted: dict[int, dict[int, Quoted]] = field(default_factory=dict)
    heard: int = 0
    """So many answers the client has."""
    sent: deque[int] = field(default_factory=deque)
    """The operations whose answers it was sent behind those."""
    detached: float | None = None
    """When its connection was lost; None while it has one. Not in the records."""

    def apply(self, record: Record) -> None:
        """Raises KeyError for a record about what there is not."""
        if isinstance(record, Emitted):
            self.sent.append(record.op)
        elif isinstance(record, Told):
            self.told.setdefault(record.op, []).append(record)
        elif isinstance(record, Quoted):
            self.quoted.setdefault(record.op, {})[record.at] = record
        elif isinstance(record, Finished):
            self._finish(record)
        elif isinstance(record, Opened):
            self._open(record)
        elif isinstance(record, Heard):
            self._hear(record)

    def grow(self, record: Grown, ids: list[bytes]) -> None:
        branch = self.branches[record.branch]
        branch.ids += ids
        branch.pending, branch.begin, branch.paid = record.pending, record.begin, record.paid
        branch.gained += record.gained

    def _open(self, record: Opened) -> None:
        branch = KeptBranch(record)
        if record.parent is not None:
            parent = self.branches[record.parent]
            branch.ids = parent.ids[:]
            branch.pending, branch.begin = parent.pending, parent.begin
            done: list[Event] = [Done(record.op)]
            self.answers[record.op] = encode(done)
        self.branches[record.branch] = branch

    def _finish(self, record: Finished) -> None:
        if record.op:
            self.answers[record.op] = record.event
            self.told.pop(record.op, None)
            self.quoted.pop(record.op, None)
        if record.branch is not None:
            self.branches[record.branch].broken = record.broken
            if record.closed:
                del self.branches[record.branch]

    def _hear(self, record: Heard) -> None:
        while self.heard < record.count and self.sent:
            self.answers.pop(self.sent.popleft(), None)
            self.heard += 1
        self.heard = max(self.heard, record.count)
        if record.resumed:
            self.sent.clear()

    def num_bytes(self) -> int:
        """About what it has in memory; segments that branches share count for each."""
        ids = (one for branch in self.branches.values() for one in branch.ids)
        told = (one.update for parts in self.told.values() for one in parts)
        return 512 + sum(map(len, ids)) + sum(map(len, self.answers.values())) + sum(map(len, told))

    def join_segments(self) -> None:
        """Make one of those that stand side by side in one branch and in no other."""
        branches = self.branches.values()
        holders = Counter(id(one) for branch in branches for one in branch.ids)
        for branch in branches:
            if len(branch.ids) < 2:
                continue
            runs = groupby(branch.ids, lambda one: holders[id(one)] == 1)
            branch.ids = [one for own, run in runs for one in ([b"".join(run)] if own else run)]

    def dump(self, segments: dict[int, int]) -> Iterator[Record]:
        """Records that amount to it. `segments` numbers those that were given already, by `id`."""
        number = self.begun.session
        yield self.begun
        for key, branch in self.branches.items():
            for ids in branch.ids:
                if id(ids) not in segments:
                    segments[id(ids)] = len(segments)
                    yield Segment(0, segments[id(ids)], ids)
            numbers = tuple(segments[id(ids)] for ids in branch.ids)
            opened = branch.opened
            yield Opened(
                number,
                key,
                opened.op,
                opened.program,
                opened.namespace,
                opened.adapter,
                opened.private,
            )
            gained = tuple(branch.gained)
            yield Grown(number, key, numbers, branch.pending, branch.begin, gained, branch.paid)
            if branch.broken is not None:
                yield Finished(number, key, 0, b"", branch.broken)
        for op, event in self.answers.items():
            yield Finished(number, None, op, event)
        for updates in self.told.values():
            yield from updates
        for quotes in self.quoted.values():
            yield from quotes.values()
        yield Heard(number, self.heard)
        for op in self.sent:
            yield Emitted(number, op)


class Kept:
    """All clients, by their numbers."""

    def __init__(self) -> None:
        self.sessions: dict[int, KeptSession] = {}
        self._segments: dict[int, bytes] = {}

    def apply(self, record: Record) -> None:
        """Raises KeyError for a record about what there is not."""
        if isinstance(record, Segment):
            self._segments[record.number] = record.ids
        elif isinstance(record, Begun):
            self.sessions[record.session] = KeptSession(record)
        elif isinstance(record, Ended):
            self.sessions.pop(record.session, None)
        elif isinstance(record, Grown):
            ids = record.ids
            found = [ids] if isinstance(ids, bytes) else [self._segments[one] for one in ids]
            self.sessions[record.session].grow(record, [one for one in found if one])
        else:
            self.sessions[record.session].apply(record)

    def forget_segments(self) -> None:
        """No more numbers of segments will come."""
        self._segments.clear()

    def dump(self) -> list[Record]:
        """Records that amount to all of it."""
        segments: dict[int, int] = {}
        for session in self.sessions.values():
            session.join_segments()
        return [record for session in self.sessions.values() for record in session.dump(segments)]
