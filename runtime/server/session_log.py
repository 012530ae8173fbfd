"""What the store is told of one client's session, and what it knew of that before."""

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
    KeptBranch,
    KeptSession,
    Quoted,
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
"""So many answers are kept for a client that never says that it has them."""

Progress = dict[int, tuple[int, int]]
"""Of one generation's samples: characters and tokens of the chunks that the client has."""


class GenerationLog(msgspec.Struct, frozen=True):
    """One `Generate`: what the engine told of its samples before, what the client has of that, and
    what is to be called when the engine tells more of a sample."""

    before: list[tuple[int, EngineOutput]]
    progress: Progress
    told: Callable[[int, EngineOutput], None]


class SessionLog:
    """Made by `attach`. Whatever a client does, its log raises nothing."""

    def __init__(
        self, store: SessionStore, kept: KeptSession, chunks: Iterable[tuple[int, int, int, int]]
    ) -> None:
        self.kept = kept
        self.flush = store.flush
        """To be called before a client gets to know what happened."""
        self._store = store
        self._active = True
        self._chunks: dict[int, Progress] = {}
        for op, index, characters, tokens in chunks:
            self._chunks.setdefault(op, {})[index] = characters, tokens
        self._grown: dict[Branch, tuple[int, int]] = {}
        """How many ids and gained pieces of a branch the store has."""
        self._opening: dict[Branch, Open] = {}
        """Branches that the store does not have yet."""

    # ------------------------------------------------------------ what was before

    def branches(self) -> Iterator[tuple[KeptBranch, SequenceState]]:
        """The branches that were open, and what each held."""
        for kept in self.kept.branches.values():
            ids, gained = array("i"), []
            for segment in map(self.kept.segments.__getitem__, kept.segments):
                ids.frombytes(segment.ids)
                if segment.branch == kept.branch:  # a fork gained nothing of its parent's
                    gained += [
                        array("i", one) if isinstance(one, bytes) else one for one in segment.gained
                    ]
            yield kept, SequenceState(ids, kept.pending, kept.begin, gained)

    def restored(self, branch: Branch) -> None:
        """The branch is as the store has it."""
        self._grown[branch] = len(branch.state.ids), len(branch.state.gained)

    def answers(self, op: Op) -> list[Event]:
        """What the client does not have of an operation that ended; nothing, if it did not."""
        answer = self.kept.answers.get(op.op)
        if answer is None:
            return []
        ended = decode_events(answer.event)
        if isinstance(op, Generate) and op.stream and isinstance(ended[0], Generated):
            has = self._chunks.pop(op.op, {})
            told = ended[0].usage.cached_tokens if op.tell_cached and not has else None
            return [*_rest(ended[0], has, told), *ended]
        return ended

    def quote(self, op: int, at: int) -> tuple[Piece, ...] | RootlaceError | None:
        """What the `at`th quote of an append found, if it was taken."""
        quoted = self.kept.quoted.get(op, {}).get(at)
        if quoted is None:
            return None
        return from_code(*quoted.error) if quoted.error is not None else quoted.pieces

    def generation(self, op: int) -> GenerationLog:
        """What is known of a generation that begins, or goes on."""
        before: list[tuple[int, EngineOutput]] = []
        for row in self.kept.told.get(op, ()):
            (update,) = decode_from_engine(row.update)
            assert isinstance(update, EngineOutput)
            before.append((row.index, update))
        return GenerationLog(before, self._chunks.pop(op, {}), partial(self._told, op))

    # ------------------------------------------------------------ what happens

    def opening(self, branch: Branch, op: Open) -> None:
        """A branch is to be opened."""
        self._opening[branch] = op

    def opened(self, branch: Branch, parent: Branch | None = None) -> None:
        """A branch is there; with a `parent`, its state is that one's."""
        op = self._opening.pop(branch, None)
        if op is None:
            return  # it failed meanwhile
        if parent is not None:
            self._grow(parent)
        program = program_name(branch.program)
        kept = KeptBranch(
            branch.id, op.op, program, branch.namespace, branch.adapter, branch.private
        )
        self._keep(self.kept.open, kept, None if parent is None else parent.id)
        self._grown[branch] = (0 if parent is None else len(parent.state.ids)), 0

    def finished(self, branch: Branch, op: int, event: Event) -> None:
        """An operation of a branch ended."""
        self.opened(branch)
        if branch.closed:
            self._grown.pop(branch, None)
        else:
            self._grow(branch)
        if not branch.closed:
            self.broke(branch)
        self._keep(self.kept.finish, branch.id, op, encode([event]), branch.closed)

    def broke(self, branch: Branch) -> None:
        """Where a branch is broken, keep why."""
        if branch.error is not None and branch.id in self.kept.branches:
            why = branch.error.code, str(branch.error)
            self._keep(self.kept.break_branch, branch.id, why)

    def quoted(self, op: int, at: int, found: tuple[Piece, ...] | RootlaceError) -> None:
        """The `at`th quote of an append was taken."""
        if isinstance(found, RootlaceError):
            self._keep(self.kept.add, Quoted(op, at, error=(found.code, str(found))))
        else:
            self._keep(self.kept.add, Quoted(op, at, found))

    def emitted(self, event: Event) -> None:
        """The client is sent an event."""
        if event.op > 0 and not isinstance(event, Chunk):
            self._keep(self.kept.add, Sent(event.op))
            if self._active and len(self.kept.sent) > MAX_UNHEARD:
                self._give_up("says of no answer that it came")

    def heard(self, count: int) -> None:
        """The client has so many answers."""
        count = min(count, self.kept.client.heard + len(self.kept.sent))
        if count > self.kept.client.heard:
            self._keep(self.kept.hear, count)

    def is_of(self, key: str, owner: str) -> bool:
        """Whether it is that of the client of this name."""
        return (self.kept.client.key, self.kept.client.owner) == (key, owner)

    def end(self) -> None:
        """The client does not come back."""
        if self._active:
            self._active = False
            self._store.end(self.kept)

    def detach(self) -> None:
        """The session is over; its client may come back."""
        if self._active:
            self._active = False
            self._store.detach(self.kept)

    def _grow(self, branch: Branch) -> None:
        state, (ids, gained) = branch.state, self._grown[branch]
        kept = self.kept.branches.get(branch.id)
        new_ids, new = state.ids[ids:].tobytes(), state.gained[gained:]
        if (
            kept is not None
            and not (new_ids or new)
            and (kept.pending, kept.begin, kept.paid) == (state.pending, state.begin, branch.paid)
        ):
            return
        self._grown[branch] = len(state.ids), len(state.gained)
        pieces = tuple(one if isinstance(one, Piece) else one.tobytes() for one in new)
        self._keep(
            self.kept.grow, branch.id, new_ids, pieces, state.pending, state.begin, branch.paid
        )

    def _keep(self, change: Callable[..., None], *args: object) -> None:
        if self._active:
            try:
                change(*args)
            except KeyError:  # no other client comes here
                self._give_up("uses an id twice")

    def _told(self, op: int, index: int, update: EngineOutput) -> None:
        self._keep(self.kept.add, Told(op, index, encode_update([update])))

    def _give_up(self, why: str) -> None:
        log.warning("client %d is not kept: it %s", self.kept.client.place, why)
        self.end()


def attach(
    store: SessionStore | None, hello: Hello, owner: str, model: str = ""
) -> SessionLog | None:
    """The log of a client of `model` that says hello; None where nothing is kept of it.

    Raises StateLost where it comes back, and what it had is not there.
    """
    if store is None or not hello.session:
        if hello.heard is not None:
            raise StateLost(
                "the server was restarted and keeps no state: what ran on it is lost"
                " (with --state DIR it would go on)"
            )
        return None
    kept = store.find(hello.session)
    known = kept is not None and kept.client.owner == owner
    if hello.heard is None:
        if kept is not None and not known:
            raise StateLost("another client has this session")
        kept = store.begin(hello.session, owner, model)
    elif kept is None or not known:
        raise StateLost("the server has nothing of this program any more")
    elif kept.client.model != model:
        raise StateLost(
            f"what ran is of the model {kept.client.model!r}; the server has {model!r} now"
        )
    elif not kept.client.heard <= hello.heard <= kept.client.heard + len(kept.sent):
        raise StateLost(
            f"the server knows of {kept.client.heard + len(kept.sent)} answers to this program,"
            f" which has {hello.heard}: its last state was lost"
        )
    else:
        kept.hear(hello.heard, resumed=True)
    kept.detached = None
    store.flush()
    return SessionLog(store, kept, hello.chunks)


def _rest(ended: Generated, has: Progress, cached: int | None) -> Iterator[Chunk]:
    """What a client does not have of a stream. `cached`: what its first chunk says of that."""
    for index, output in enumerate(ended.outputs):
        characters, tokens = has.get(index, (0, 0))
        text, ids = output.text[characters:], output.token_ids[tokens:]
        if text or ids:
            yield Chunk(ended.op, index, text, ids, output.logprobs[tokens:], cached)
            cached = None
