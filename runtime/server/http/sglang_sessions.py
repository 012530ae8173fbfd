"""sglang's sessions: requests of `/generate` that go on from earlier ones, by their ids; and what
holds the prefixes of such requests in the cache."""

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
# Sequences of requests that have ended, which stay in the cache for others to go on from.


MAX_HELD = 256
_PART_OF_CACHE = 4
"""All that is held is at most one part in so many of what the cache holds."""


class PrefixHolds:
    """Keeps such sequences open, as those of a program that still runs, whose path in the cache is
    evicted last.

    Each is held for `hold_seconds`. The oldest are let go where there would be too many, or where
    they would take too much of the cache. What was let go counts as what requests of no program
    left behind.
    """

    def __init__(self, gateway: ServedModel) -> None:
        self._gateway = gateway
        self._held: dict[ExitStack, int] = {}
        """What lets each go, and its tokens."""
        self._tokens = 0

    def add(self, opened: OpenSequences, tokens: int) -> Callable[[], None]:
        """Hold sequences that have so many `tokens` for themselves. What this returns closes them,
        and keeps nothing in memory once they are closed: neither them nor their model."""
        held = ExitStack()
        seconds = self._gateway.config.hold_seconds
        timer = asyncio.get_running_loop().call_later(seconds, held.close)
        for let_go in (opened.close, timer.cancel):
            held.callback(let_go)
        held.callback(self._forget, held)
        self._held[held] = tokens
        self._tokens += tokens
        most = self._gateway.model_info.capacity_tokens // _PART_OF_CACHE
        while self._held and (len(self._held) > MAX_HELD or self._tokens > most):
            next(iter(self._held)).close()
        return held.close

    def _forget(self, held: ExitStack) -> None:
        self._tokens -= self._held.pop(held)


# Sessions -----------------------------------------------------------------------------------------


MAX_SESSIONS = 1024
MAX_TOKENS = 16 * 2**20
"""Of the turns of all sessions, four bytes each."""
_TURN_TOKENS = 256
"""A turn counts as so many more: what takes its memory is not only its tokens."""


class OpenSessionBody(Body):
    """`POST /open_session`."""

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
    """`POST /close_session`."""

    session_id: str
    model: str | None = None


class SessionParams(Body):
    """Go on from the request `rid` of the session `id`: behind its prompt and output, or behind the
    first `offset` tokens of them (from the end if negative), or without the output.

    With `replace` all that went on from that request is forgotten (without a `rid`: all requests of
    the session), and what of it runs is ended; else the new request is one more branch.

    A session that was opened with `streaming` has one line: each request goes on from the last one
    that was not aborted, whatever `rid` says.
    """

    id: str
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


_Key = tuple[str, str]
"""A session's: the name of the API key, and the id."""


@dataclass(eq=False)
class Turn:
    """A request of a session: the tokens of its prompt and, as far as they came, of its output."""

    key: _Key
    rid: str
    prompt: array[int]
    parent: Turn | None = None
    output: array[int] = field(default_factory=lambda: array("i"))
    done: bool = False
    counted: int = 0
    """As how many it was counted for `MAX_TOKENS`."""
    abort: Callable[[], None] = nothing
    let_go: Callable[[], None] = nothing
    """Have the cache treat it like any other."""

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def cost(self) -> int:
        """How many tokens it counts as."""
        return self.size + len(self.rid) + _TURN_TOKENS


class Sessions:
    """The open sessions of one model.

    Beyond `MAX_SESSIONS` and `MAX_TOKENS`, of the key that has the most that one is closed which
    was used least recently and of which nothing runs; of its only one, the oldest turns go.
    """

    def __init__(self, gateway: ServedModel, holds: PrefixHolds) -> None:
        self._gateway = gateway
        self._holds = holds
        self._turns: OrderedDict[_Key, dict[str, Turn]] = OrderedDict()
        self._lines: set[_Key] = set()
        """The sessions of one line."""
        self._tokens = 0

    async def open(self, body: OpenSessionBody) -> str:
        """Its reply is the session's id."""
        check_name(self._gateway.model_info, body.model)
        key = owner(), body.session_id or uuid.uuid4().hex
        if key in self._turns:
            raise InvalidParameter("session_id", f"the session {key[1]!r} is open already")
        self._turns[key] = {}
        if body.streaming:
            self._lines.add(key)
        self._bound()
        return key[1]

    async def close(self, body: CloseSessionBody) -> Status:
        check_name(self._gateway.model_info, body.model)
        key = owner(), body.session_id
        if key not in self._turns:
            raise InvalidParameter("session_id", f"there is no session {body.session_id!r}")
        self._close(key)
        return Status("closed")

    async def begin(self, params: SessionParams, prompt: Prompt, rid: str) -> Turn:
        """A new turn. Raises InvalidParameter for a session or request that is not there, or cannot
        be gone on from."""
        given = prompt.ids if prompt.ids is not None else await self._encode(prompt.text or "")
        new = array("i", given)
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
            for turn in list(turns.values()):  # each comes after the one that it went on from
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
        """The turn's request ended. Its branch is held, of which the turn before is the beginning,
        unless the turn was replaced or the session closed, or it was aborted in a session of one
        line, which is then as before."""
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
            turn.parent = None  # nor does it keep all that came before in memory
            if self._has(before):
                self._forget(self._turns[turn.key].pop(before.rid))

    @contextmanager
    def running(self, turn: Turn) -> Iterator[None]:
        """While the block runs, `turn.abort` may end its request. A turn that has not ended with
        the block is forgotten."""
        try:
            yield
        finally:
            turn.abort = nothing  # and not what keeps the whole request in memory
            if not turn.done and self._has(turn):
                self._forget(self._turns[turn.key].pop(turn.rid))

    def _has(self, turn: Turn) -> bool:
        return self._turns.get(turn.key, {}).get(turn.rid) is turn

    async def _encode(self, text: str) -> list[int]:
        check_length(self._gateway, "text", len(text))
        encode = self._gateway.tokenizer.encode_pieces
        pieces = [Piece(text, special=True)]
        return await self._gateway.tokenize(len(text), encode, pieces, None, True)

    def _without_bos(self, ids: array[int]) -> array[int]:
        """A prompt that goes on from another one, without what would begin it."""
        bos = array("i", self._gateway.tokenizer.bos_ids)
        return ids[len(bos) :] if ids[: len(bos)] == bos else ids

    def _count(self, turn: Turn) -> None:
        """The turn is new, or has grown."""
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
            latest = next(reversed(self._turns))  # what was asked for now
            old = (key for key in self._turns if key[0] == most and key != latest)
            idle = next(filter(self._is_idle, old), None)
            if idle is not None:
                self._close(idle)
            elif not (by_tokens and latest[0] == most and self._forget_oldest(latest)):
                return  # what is left runs

    def _forget_oldest(self, key: _Key) -> bool:
        """Of the session's turns that have ended; whether there is one."""
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
    """What a request goes on from in a session of one line, of the turns that it has."""
    for name in ("offset", "replace", "drop_previous_output"):
        if getattr(params, name):
            raise InvalidParameter(
                f"session_params.{name}", f"a streaming session only goes on: {name} has no place"
            )
    for turn in turns.values():
        if not turn.done:
            raise InvalidParameter("session_params.id", f"its request {turn.rid!r} has not ended")
    return next(reversed(turns.values()), None)
