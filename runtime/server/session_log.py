"""What the journal is told of one client's session, and what it knew of it before."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator

from rootlace.runtime.contracts.messages import EngineOutput, decode_from_engine
from rootlace.runtime.contracts.messages import encode as encode_update
from rootlace.runtime.server.branch import Branch, BranchState
from rootlace.runtime.server.records import (
    Emitted,
    Finished,
    Grown,
    Heard,
    Opened,
    Quoted,
    Record,
    Told,
)
from rootlace.runtime.server.session_store import Journal, KeptBranch, KeptSession
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


class SessionLog:
    """Made by `attach`. Whatever a client does, its log raises nothing."""

    def __init__(
        self, journal: Journal, kept: KeptSession, chunks: Iterable[tuple[int, int, int, int]]
    ) -> None:
        self.kept = kept
        self._journal = journal
        self._number = kept.begun.session
        self._active = True
        self._chunks: dict[int, Progress] = {}
        for op, index, characters, tokens in chunks:
            self._chunks.setdefault(op, {})[index] = characters, tokens
        self._grown: dict[Branch, tuple[int, int]] = {}
        """Of how many ids and gained pieces of a branch the journal was told."""
        self._opening: dict[Branch, Open] = {}
        """Branches of which it was not told yet."""

    # ------------------------------------------------------------ what was before

    def branches(self) -> Iterator[tuple[KeptBranch, BranchState]]:
        """What there was, and what it held."""
        for kept in self.kept.branches.values():
            ids, gained = array("i"), []
            for segment in kept.ids:
                ids.frombytes(segment)
            for one in kept.gained:
                gained.append(_ids(one) if isinstance(one, bytes) else one)
            yield kept, BranchState(ids, kept.pending, kept.begin, gained)

    def restored(self, branch: Branch) -> None:
        """The branch is as the journal knows it."""
        self._grown[branch] = len(branch.state.ids), len(branch.state.gained)

    def answers(self, op: Op) -> list[Event]:
        """What the client does not have of an operation that ended; nothing, if it did not."""
        frame = self.kept.answers.get(op.op)
        if not frame:
            return []
        ended = decode_events(frame)
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
        return GenerationLog(self, op, self._chunks.pop(op, {}))

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
        program = branch.program.partition(":")[2]
        above = None if parent is None else parent.id
        self._add(
            Opened(
                self._number,
                branch.id,
                op.op,
                program,
                branch.namespace,
                branch.adapter,
                branch.private,
                above,
            )
        )
        self._grown[branch] = (0 if parent is None else len(parent.state.ids)), 0

    def finished(self, branch: Branch, op: int, event: Event) -> None:
        """An operation of a branch ended."""
        self.opened(branch)
        if branch.closed:
            self._grown.pop(branch, None)
        else:
            self._grow(branch)
        broken = None if branch.error is None else (branch.error.code, str(branch.error))
        ended = encode([event])
        self._add(Finished(self._number, branch.id, op, ended, broken, branch.closed))

    def broke(self, branch: Branch) -> None:
        """A branch is broken, by what is no operation of its own."""
        if branch.id in self.kept.branches and branch.error is not None:
            broken = branch.error.code, str(branch.error)
            self._add(Finished(self._number, branch.id, 0, b"", broken))

    def quoted(self, op: int, at: int, found: tuple[Piece, ...] | RootlaceError) -> None:
        """The `at`th quote of an append was taken."""
        if isinstance(found, RootlaceError):
            self._add(Quoted(self._number, op, at, error=(found.code, str(found))))
        else:
            self._add(Quoted(self._number, op, at, found))

    def told(self, op: int, index: int, update: EngineOutput) -> None:
        """The engine told this of sample `index` of a generation."""
        self._add(Told(self._number, op, index, encode_update([update])))

    def emitted(self, event: Event) -> None:
        """The client is sent an event."""
        if event.op > 0 and not isinstance(event, Chunk):
            self._add(Emitted(self._number, event.op))
            if self._active and len(self.kept.sent) > MAX_UNHEARD:
                log.warning(
                    "client %d is not kept: it says of no answer that it came", self._number
                )
                self.end()

    def heard(self, count: int) -> None:
        """The client has so many answers."""
        count = min(count, self.kept.heard + len(self.kept.sent))
        if count > self.kept.heard:
            self._add(Heard(self._number, count))

    def is_of(self, key: str, owner: str) -> bool:
        """Whether it is that of the client of this name."""
        begun = self.kept.begun
        return (begun.key, begun.owner) == (key, owner)

    def flush(self) -> None:
        """To be called before a client gets to know what happened."""
        self._journal.flush()

    def end(self) -> None:
        """The client does not come back."""
        if self._active:
            self._active = False
            self._journal.end(self.kept)

    def detach(self) -> None:
        """The session is over; its client may come back."""
        if self._active:
            self._active = False
            self._journal.detach(self.kept)

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
        self._add(
            Grown(self._number, branch.id, new_ids, state.pending, state.begin, pieces, branch.paid)
        )

    def _add(self, record: Record) -> None:
        if not self._active:
            return
        try:
            self._journal.add(record)
        except KeyError:
            # Only who gives an id twice comes here.
            log.warning("client %d is not kept: it uses an id twice", self._number)
            self.end()


class GenerationLog:
    """One `Generate`: what the engine told of it `before`, and what the client has of that."""

    def __init__(self, session: SessionLog, op: int, progress: Progress) -> None:
        self._session = session
        self._op = op
        self.progress = progress

    def before(self) -> list[tuple[int, EngineOutput]]:
        found: list[tuple[int, EngineOutput]] = []
        for told in self._session.kept.told.get(self._op, ()):
            (update,) = decode_from_engine(told.update)
            assert isinstance(update, EngineOutput)
            found.append((told.index, update))
        return found

    def told(self, index: int, update: EngineOutput) -> None:
        self._session.told(self._op, index, update)


def attach(journal: Journal | None, hello: Hello, owner: str, model: str = "") -> SessionLog | None:
    """The log of a client of `model` that says hello; None where nothing is kept of it.

    Raises StateLost where it comes back, and what it had is not there.
    """
    if journal is None or not hello.session:
        if hello.heard is not None:
            raise StateLost(
                "the server was restarted and keeps no state: what ran on it is lost"
                " (with --state DIR it would go on)"
            )
        return None
    kept = journal.find(hello.session)
    known = kept is not None and kept.begun.owner == owner
    if hello.heard is None:
        if kept is not None and not known:
            raise StateLost("another client has this session")
        kept = journal.begin(hello.session, owner, model)
    elif kept is None or not known:
        raise StateLost("the server has nothing of this program any more")
    elif kept.begun.model != model:
        raise StateLost(
            f"what ran is of the model {kept.begun.model!r}; the server has {model!r} now"
        )
    elif not kept.heard <= hello.heard <= kept.heard + len(kept.sent):
        raise StateLost(
            f"the server knows of {kept.heard + len(kept.sent)} answers to this program, which has"
            f" {hello.heard}: its last state was lost"
        )
    else:
        journal.add(Heard(kept.begun.session, hello.heard, resumed=True))
    kept.detached = None
    journal.flush()
    return SessionLog(journal, kept, hello.chunks)


def _rest(ended: Generated, has: Progress, cached: int | None) -> Iterator[Chunk]:
    """What a client does not have of a stream. `cached`: what its first chunk says of that."""
    for index, output in enumerate(ended.outputs):
        characters, tokens = has.get(index, (0, 0))
        text, ids = output.text[characters:], output.token_ids[tokens:]
        if text or ids:
            yield Chunk(ended.op, index, text, ids, output.logprobs[tokens:], cached)
            cached = None


def _ids(segment: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(segment)
    return ids
