"""Log of one client's session: records for the store, and the records of an earlier server."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from rootlace.runtime.contracts.messages import EngineOutput, decode_from_engine
from rootlace.runtime.contracts.messages import encode as encode_update
from rootlace.runtime.server.branch import Branch
from rootlace.runtime.server.sequence import SequenceState, program_name
from rootlace.runtime.server.session_store import (
    Quoted,
    SavedBranch,
    SavedSession,
    Sent,
    SessionStore,
    Told,
)
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.errors import RootlaceError, StateLost, from_code
from rootlace.wire.protocol import (
    Chunk,
    Event,
    Generate,
    Generated,
    Hello,
    Op,
    Open,
    decode_events,
    encode,
)

log = logging.getLogger(__name__)

MAX_UNHEARD = 1 << 18
"""Most answers kept for a client that never confirms any."""

Progress = dict[int, tuple[int, int]]
"""(characters, tokens) of the chunks that the client has, by sample of one generation."""


class GenerationLog(msgspec.Struct, frozen=True):
    """Log of one `Generate`: (sample, update) pairs of an earlier server, the client's progress in
    them, and a callback that records a new update."""

    before: list[tuple[int, EngineOutput]]
    progress: Progress
    record: Callable[[int, EngineOutput], None]


class SessionLog:
    """Log of a session, made by `attach`. No fault of a client makes its methods raise."""

    def __init__(
        self, store: SessionStore, saved: SavedSession, chunks: Iterable[tuple[int, int, int, int]]
    ) -> None:
        self.saved = saved
        self.flush = store.flush
        """Commits the records; called before a client learns of the changes."""
        self._store = store
        self._active = True
        self._chunks: dict[int, Progress] = {}
        for op, index, characters, tokens in chunks:
            self._chunks.setdefault(op, {})[index] = characters, tokens
        self._grown: dict[Branch, tuple[int, int]] = {}
        """(ids, gained pieces) of each branch in the store."""
        self._opening: dict[Branch, Open] = {}
        """Branches that the store does not have yet."""

    # ------------------------------------------------------------ earlier records

    def branches(self) -> Iterator[tuple[SavedBranch, SequenceState]]:
        """Give the branches that were open, and the state of each."""
        for saved in self.saved.branches.values():
            ids, gained = array("i"), []
            for segment in map(self.saved.segments.__getitem__, saved.segments):
                ids.frombytes(segment.ids)
                if segment.branch == saved.branch:  # a fork gained nothing of its parent's
                    gained += [
                        array("i", one) if isinstance(one, bytes) else one for one in segment.gained
                    ]
            yield saved, SequenceState(ids, saved.pending, saved.begin, gained)

    def restored(self, branch: Branch) -> None:
        """Note that the branch equals its record in the store."""
        self._grown[branch] = len(branch.state.ids), len(branch.state.gained)

    def answers(self, op: Op) -> list[Event]:
        """Return events that the client lacks of an ended operation; none of a running one."""
        answer = self.saved.answers.get(op.op)
        if answer is None:
            return []
        ended = decode_events(answer.event)
        if isinstance(op, Generate) and op.stream and isinstance(ended[0], Generated):
            has = self._chunks.pop(op.op, {})
            cached_tokens = ended[0].usage.cached_tokens if op.tell_cached and not has else None
            return [*_rest(ended[0], has, cached_tokens), *ended]
        return ended

    def quote(self, op: int, at: int) -> tuple[Piece, ...] | RootlaceError | None:
        """Return the result of quote `at` of an append; None if the quote was not taken."""
        quoted = self.saved.quoted.get(op, {}).get(at)
        if quoted is None:
            return None
        return from_code(*quoted.error) if quoted.error is not None else quoted.pieces

    def generation(self, op: int) -> GenerationLog:
        """Return the records of a generation that begins or goes on."""
        before: list[tuple[int, EngineOutput]] = []
        for row in self.saved.told.get(op, ()):
            (update,) = decode_from_engine(row.update)
            assert isinstance(update, EngineOutput)
            before.append((row.index, update))
        return GenerationLog(before, self._chunks.pop(op, {}), partial(self._record_update, op))

    # ------------------------------------------------------------ new records

    def opening(self, branch: Branch, op: Open) -> None:
        """Note that a branch is to be opened."""
        self._opening[branch] = op

    def opened(self, branch: Branch, parent: Branch | None = None) -> None:
        """Record a branch that was opened; with a `parent`, as a fork of it."""
        op = self._opening.pop(branch, None)
        if op is None:
            return  # the opening failed meanwhile
        if parent is not None:
            self._grow(parent)
        program = program_name(branch.program)
        saved = SavedBranch(
            branch.id, op.op, program, branch.namespace, branch.adapter, branch.private
        )
        self._keep(self.saved.open, saved, None if parent is None else parent.id)
        self._grown[branch] = (0 if parent is None else len(parent.state.ids)), 0

    def finished(self, branch: Branch, op: int, event: Event) -> None:
        """Record the end of a branch's operation."""
        self.opened(branch)
        if branch.closed:
            self._grown.pop(branch, None)
        else:
            self._grow(branch)
        if not branch.closed:
            self.broke(branch)
        self._keep(self.saved.finish, branch.id, op, encode([event]), branch.closed)

    def broke(self, branch: Branch) -> None:
        """Record a broken branch's error."""
        if branch.error is not None and branch.id in self.saved.branches:
            why = branch.error.code, str(branch.error)
            self._keep(self.saved.break_branch, branch.id, why)

    def quoted(self, op: int, at: int, result: tuple[Piece, ...] | RootlaceError) -> None:
        """Record the result of quote `at` of an append."""
        if isinstance(result, RootlaceError):
            self._keep(self.saved.add, Quoted(op, at, error=(result.code, str(result))))
        else:
            self._keep(self.saved.add, Quoted(op, at, result))

    def emitted(self, event: Event) -> None:
        """Record that an event is sent to the client."""
        if event.op > 0 and not isinstance(event, Chunk):
            self._keep(self.saved.add, Sent(event.op))
            if self._active and len(self.saved.sent) > MAX_UNHEARD:
                self._give_up("says of no answer that it came")

    def heard(self, count: int) -> None:
        """Record that the client has `count` answers."""
        count = min(count, self.saved.client.heard + len(self.saved.sent))
        if count > self.saved.client.heard:
            self._keep(self.saved.hear, count)

    def is_of(self, key: str, owner: str) -> bool:
        """Return whether the session has the name `key` and belongs to the API key of `owner`."""
        return (self.saved.client.key, self.saved.client.owner) == (key, owner)

    def end(self) -> None:
        """Delete the session's records: the client does not come back."""
        if self._active:
            self._active = False
            self._store.end(self.saved)

    def detach(self) -> None:
        """End the session's use; its client may come back."""
        if self._active:
            self._active = False
            self._store.detach(self.saved)

    def _grow(self, branch: Branch) -> None:
        state, (ids, gained) = branch.state, self._grown[branch]
        saved = self.saved.branches.get(branch.id)
        new_ids, new = state.ids[ids:].tobytes(), state.gained[gained:]
        if (
            saved is not None
            and not (new_ids or new)
            and (saved.pending, saved.begin, saved.paid)
            == (state.pending, state.begin, branch.paid)
        ):
            return
        self._grown[branch] = len(state.ids), len(state.gained)
        pieces = tuple(one if isinstance(one, Piece) else one.tobytes() for one in new)
        self._keep(
            self.saved.grow, branch.id, new_ids, pieces, state.pending, state.begin, branch.paid
        )

    def _keep(self, change: Callable[..., None], *args: object) -> None:
        if self._active:
            try:
                change(*args)
            except KeyError:  # no other client comes here
                self._give_up("uses an id twice")

    def _record_update(self, op: int, index: int, update: EngineOutput) -> None:
        self._keep(self.saved.add, Told(op, index, encode_update([update])))

    def _give_up(self, why: str) -> None:
        log.warning("client %d is not kept: it %s", self.saved.client.place, why)
        self.end()


def attach(
    store: SessionStore | None, hello: Hello, owner: str, model: str = ""
) -> SessionLog | None:
    """Return the log of a client of `model` that says hello; None where no session is kept.

    Raises StateLost where the client comes back and its records are gone.
    """
    if store is None or not hello.session:
        if hello.heard is not None:
            raise StateLost(
                "the server was restarted and keeps no state: what ran on it is lost"
                " (with --state DIR it would go on)"
            )
        return None
    saved = store.find(hello.session)
    known = saved is not None and saved.client.owner == owner
    if hello.heard is None:
        if saved is not None and not known:
            raise StateLost("another client has this session")
        saved = store.begin(hello.session, owner, model)
    elif saved is None or not known:
        raise StateLost("the server has nothing of this program any more")
    elif saved.client.model != model:
        raise StateLost(
            f"what ran is of the model {saved.client.model!r}; the server has {model!r} now"
        )
    elif not saved.client.heard <= hello.heard <= saved.client.heard + len(saved.sent):
        raise StateLost(
            f"the server knows of {saved.client.heard + len(saved.sent)} answers to this program,"
            f" which has {hello.heard}: its last state was lost"
        )
    else:
        saved.hear(hello.heard, resumed=True)
    saved.detached = None
    store.flush()
    return SessionLog(store, saved, hello.chunks)


def _rest(ended: Generated, has: Progress, cached: int | None) -> Iterator[Chunk]:
    """Give the chunks that a client lacks; the first one tells `cached` tokens."""
    for index, output in enumerate(ended.outputs):
        characters, tokens = has.get(index, (0, 0))
        text, ids = output.text[characters:], output.token_ids[tokens:]
        if text or ids:
            yield Chunk(ended.op, index, text, ids, output.logprobs[tokens:], cached)
            cached = None
