"""sglang's sessions: requests of `/generate` that go on from earlier ones by id. Their prefixes are
held in the cache."""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from rootlace.runtime.server.auth import owner
from rootlace.runtime.server.http.body import Body, ignored
from rootlace.runtime.server.http.chat_pipeline import check_length
from rootlace.runtime.server.http.errors import InvalidParameter
from rootlace.runtime.server.http.generation import GenerationStream
from rootlace.runtime.server.http.replies import Status
from rootlace.runtime.server.http.request_fields import Prompt
from rootlace.runtime.server.sequence import OpenSequences
from rootlace.runtime.server.served_model import ServedModel, check_name
from rootlace.runtime.server.server_state import nothing
from rootlace.runtime.server.tokenizer import Piece
from rootlace.wire.protocol import Output

# Held prefixes ------------------------------------------------------------------------------------
#
# Sequences of ended requests, kept in the cache for later requests.


MAX_HELD = 256
_PART_OF_CACHE = 4
"""Held prefixes take at most one part in this many of the cache."""


class PrefixHolds:
    """Holder of ended requests' sequences: they stay open like a running program's, whose path in
    the cache is evicted last.

    Each is held for `hold_seconds`. The oldest are released where there would be too many, or where
    they would take too much of the cache. Released prefixes count like those of requests without a
    program.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._held: dict[ExitStack, int] = {}
        """Maps each release callback to the number of tokens it frees."""
        self._tokens = 0

    def add(self, opened: OpenSequences, tokens: int) -> Callable[[], None]:
        """Hold sequences with `tokens` of their own. Returns the function that releases them; once
        they are closed, the function keeps neither them nor their model in memory."""
        held = ExitStack()
        seconds = self._model.config.hold_seconds
        timer = asyncio.get_running_loop().call_later(seconds, held.close)
        for let_go in (opened.close, timer.cancel):
            held.callback(let_go)
        held.callback(self._forget, held)
        self._held[held] = tokens
        self._tokens += tokens
        max_tokens = self._model.model_info.capacity_tokens // _PART_OF_CACHE
        while self._held and (len(self._held) > MAX_HELD or self._tokens > max_tokens):
            next(iter(self._held)).close()
        return held.close

    def _forget(self, held: ExitStack) -> None:
        self._tokens -= self._held.pop(held)


# Sessions -----------------------------------------------------------------------------------------


MAX_SESSIONS = 1024
MAX_TOKENS = 16 * 2**20
"""Most tokens of all sessions' turns, four bytes each."""
_TURN_TOKENS = 256
"""Tokens that a turn counts in addition, for its other memory."""


class OpenSessionBody(Body):
    """Body of `POST /open_session`."""

    capacity_of_str_len: Annotated[
        int | None, ignored("a sequence may be as long as the model's context")
    ] = None
    session_id: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    streaming: bool | None = None
    timeout: Annotated[
        float | None, ignored("what is used least recently is closed where room is needed")
    ] = None
    model: str | None = None


class CloseSessionBody(Body):
    """Body of `POST /close_session`."""

    session_id: str
    model: str | None = None


class SessionParams(Body):
    """Earlier request to go on from: `rid` of the session `id`. The new prompt stands behind its
    prompt and output, behind their first `offset` tokens (negative: from the end), or without the
    output.

    With `replace`, requests behind that one are forgotten and ended (without a `rid`: all of the
    session's). Otherwise the new request is one more branch.

    A session opened with `streaming` has one line: each request goes on from the last one that was
    not aborted, whatever `rid` says.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


_Key = tuple[str, str]
"""Session: the name of the API key, and the id."""


@dataclass(eq=False)
class Turn:
    """Request of a session: the tokens of its prompt and, as far as they came, of its output."""

    key: _Key
    rid: str
    prompt: array[int]
    parent: Turn | None = None
    output: array[int] = field(default_factory=lambda: array("i"))
    done: bool = False
    counted: int = 0
    """Tokens that the turn is counted with for `MAX_TOKENS`."""
    abort: Callable[[], None] = nothing
    let_go: Callable[[], None] = nothing
    """Releases its prefix in the cache."""

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def cost(self) -> int:
        """Tokens that the turn counts as."""
        return self.size + len(self.rid) + _TURN_TOKENS


class Sessions:
    """Open sessions of one model.

    Beyond `MAX_SESSIONS` and `MAX_TOKENS`, the key with most loses a session: the least recently
    used one without a running request. If that is its only session, its oldest turns go.
    """

    def __init__(self, model: ServedModel, holds: PrefixHolds) -> None:
        self._model = model
        self._holds = holds
        self._turns: OrderedDict[_Key, dict[str, Turn]] = OrderedDict()
        self._lines: set[_Key] = set()
        """Sessions of one line (`streaming`)."""
        self._tokens = 0

    async def open(self, body: OpenSessionBody) -> str:
        """Open a session; the reply is its id."""
        check_name(self._model.model_info, body.model)
        key = owner(), body.session_id or uuid.uuid4().hex
        if key in self._turns:
            raise InvalidParameter("session_id", f"the session {key[1]!r} is open already")
        self._turns[key] = {}
        if body.streaming:
            self._lines.add(key)
        self._bound()
        return key[1]

    async def close(self, body: CloseSessionBody) -> Status:
        check_name(self._model.model_info, body.model)
        key = owner(), body.session_id
        if key not in self._turns:
            raise InvalidParameter("session_id", f"there is no session {body.session_id!r}")
        self._close(key)
        return Status("closed")

    async def begin(self, params: SessionParams, prompt: Prompt, rid: str) -> Turn:
        """Begin a turn. Raises InvalidParameter for an unknown session or request, or one that
        cannot be gone on from."""
        ids = prompt.ids if prompt.ids is not None else await self._encode(prompt.text or "")
        new = array("i", ids)
        key = owner(), params.id
        if key not in self._turns:
            raise InvalidParameter("session_params.id", f"there is no session {params.id!r}")
        self._turns.move_to_end(key)
        turns = self._turns[key]
        if rid in turns:
            raise InvalidParameter("rid", f"the session has a request {rid!r} already")
        before = None
        if key in self._lines:
            before = _last(params, turns)
        elif params.rid is not None:
            before = turns.get(params.rid)
            if before is None:
                raise InvalidParameter(
                    "session_params.rid", f"the session has no request {params.rid!r}"
                )
            if not (before.done or params.replace):
                raise InvalidParameter(
                    "session_params.rid", f"the request {params.rid!r} has not ended"
                )
        if params.replace:
            if before is not None and not before.done:
                before.abort()
            gone: set[Turn] = set()
            for turn in list(turns.values()):  # each stands behind the turn it went on from
                if before is None or turn.parent is before or turn.parent in gone:
                    gone.add(turn)
                    self._forget(turns.pop(turn.rid))
        if before is not None:
            known = before.prompt if params.drop_previous_output else before.prompt + before.output
            new = known[: params.offset or None] + self._without_bos(new)
        turn = turns[rid] = Turn(key, rid, new, before)
        self._count(turn)
        return turn

    def end(self, turn: Turn, output: Output, shots: GenerationStream) -> None:
        """End a turn's request, and hold its branch, which begins with the previous turn's. A
        replaced turn, or one of a closed session, is not held. After an abort, a session of one
        line stays as before."""
        aborted = output.finish_reason == "abort"
        if aborted and turn.key in self._lines:
            return
        if not aborted:
            turn.output = array("i", output.token_ids)
        turn.done = True
        if not self._has(turn):
            return
        self._count(turn)
        before = turn.parent
        if shots.keeps:
            turn.let_go = self._holds.add(shots.keep(), turn.size)
            if before is not None:
                before.let_go()
        if turn.key in self._lines and before is not None:
            turn.parent = None  # nor does the turn keep all earlier ones in memory
            if self._has(before):
                self._forget(self._turns[turn.key].pop(before.rid))

    @contextmanager
    def running(self, turn: Turn) -> Iterator[None]:
        """Let `turn.abort` end the request while the block runs. A turn that has not ended with the
        block is forgotten."""
        try:
            yield
        finally:
            turn.abort = nothing  # drop the function that keeps the whole request in memory
            if not turn.done and self._has(turn):
                self._forget(self._turns[turn.key].pop(turn.rid))

    def _has(self, turn: Turn) -> bool:
        return self._turns.get(turn.key, {}).get(turn.rid) is turn

    async def _encode(self, text: str) -> list[int]:
        check_length(self._model, "text", len(text))
        encode = self._model.tokenizer.encode_pieces
        pieces = [Piece(text, special=True)]
        return await self._model.tokenize(len(text), encode, pieces, None, True)

    def _without_bos(self, ids: array[int]) -> array[int]:
        """Remove the BOS of a prompt that goes on from another one."""
        bos = array("i", self._model.tokenizer.bos_ids)
        return ids[len(bos) :] if ids[: len(bos)] == bos else ids

    def _count(self, turn: Turn) -> None:
        """Count a new or grown turn."""
        self._tokens += turn.cost - turn.counted
        turn.counted = turn.cost
        self._bound()

    def _bound(self) -> None:
        while len(self._turns) > MAX_SESSIONS or self._tokens > MAX_TOKENS:
            by_tokens = self._tokens > MAX_TOKENS
            shares: Counter[str] = Counter()
            for key, turns in self._turns.items():
                shares[key[0]] += sum(one.counted for one in turns.values()) if by_tokens else 1
            most = max(shares, key=lambda name: shares[name])
            latest = next(reversed(self._turns))  # the session of the current request
            old = (key for key in self._turns if key[0] == most and key != latest)
            idle = next(filter(self._is_idle, old), None)
            if idle is not None:
                self._close(idle)
            elif not (by_tokens and latest[0] == most and self._forget_oldest(latest)):
                return  # all others have running requests

    def _forget_oldest(self, key: _Key) -> bool:
        """Forget the session's oldest ended turn; return whether there was one."""
        turns = self._turns[key]
        oldest = next((turn for turn in turns.values() if turn.done), None)
        if oldest is not None:
            self._forget(turns.pop(oldest.rid))
        return oldest is not None

    def _is_idle(self, key: _Key) -> bool:
        return all(turn.done for turn in self._turns[key].values())

    def _close(self, key: _Key) -> None:
        self._lines.discard(key)
        for turn in self._turns.pop(key).values():
            self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        self._tokens -= turn.counted
        turn.let_go()
        if not turn.done:
            turn.abort()


def _last(params: SessionParams, turns: dict[str, Turn]) -> Turn | None:
    """Return the turn that a request of a one-line session goes on from."""
    for name in ("offset", "replace", "drop_previous_output"):
        if getattr(params, name):
            raise InvalidParameter(
                f"session_params.{name}", f"a streaming session only goes on: {name} has no place"
            )
    for turn in turns.values():
        if not turn.done:
            raise InvalidParameter("session_params.id", f"its request {turn.rid!r} has not ended")
    return next(reversed(turns.values()), None)
