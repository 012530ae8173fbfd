"""Responses that later requests may go on from, as many as fit in bounds, maybe on a disk, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from rootlace.runtime.gateway.http.chat.held import Held
from rootlace.runtime.gateway.http.errors import ResponseNotFound
from rootlace.runtime.gateway.http.openai.response_disk import Kept, ResponseDisk

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Stored:
    """A response as it was given, and the conversation up to its end.

    Messages are shared with the responses before it; `size` is in bytes and without them. `salt` is
    that of the namespace which has the conversation's KV. `held` is the branch, and `let_go` has
    the cache treat it like any other.
    """

    response: Mapping[str, Any]
    messages: tuple[dict[str, Any], ...]
    size: int
    salt: str = ""
    held: Held | None = None
    let_go: Callable[[], None] = lambda: None


class ResponseStore:
    """The latest responses by id. Where they are too many, that key which has the most of them
    forgets the one that it used least recently: no key pushes out those of one that has fewer."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._of: dict[str, _Responses] = {}
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._disk: ResponseDisk | None = None
        self._numbers = count(1)

    def open(self, disk: ResponseDisk) -> None:
        """Take what the disk has of an earlier server, and keep there what comes."""
        messages, responses = disk.read()
        self._numbers = count(max(messages, default=0) + 1)
        for kept in responses:
            conversation = [(number, messages[number]) for number in kept.numbers]
            self._add(kept.response, conversation, kept.owner, kept.salt)
        self._disk = disk
        self._shorten_all()

    async def flush(self) -> None:
        """Return when the disk, if there is one, has been told of all."""
        if self._disk is not None:
            await self._disk.flush()

    def __len__(self) -> int:
        return sum(len(one.stored) for one in self._of.values())

    @property
    def nbytes(self) -> int:
        """What all of them take."""
        return sum(one.nbytes for one in self._of.values())

    def put(
        self,
        response: Mapping[str, Any],
        before: tuple[dict[str, Any], ...],
        new: list[dict[str, Any]],
        owner: str = "",
        salt: str = "",
        held: Held | None = None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep a response to the messages `before` and `new`, the last of which is its answer.

        With another `owner` it is not found, and nobody goes on from it with another `salt`.
        """
        own = self._of.setdefault(owner, _Responses())
        numbers = [(own.number(message), message) for message in (*before, *new)]
        fresh = {id(message): next(self._numbers) for number, message in numbers if not number}
        messages = [(number or fresh[id(message)], message) for number, message in numbers]
        self._add(response, messages, owner, salt, held, let_go)
        if self._disk is not None:
            unknown = set(fresh.values())
            kept = Kept(response["id"], owner, salt, response, [number for number, _ in messages])
            self._disk.put(kept, {n: message for n, message in messages if n in unknown})
        self._shorten_all()

    def _add(
        self,
        response: Mapping[str, Any],
        messages: list[tuple[int, dict[str, Any]]],
        owner: str,
        salt: str,
        held: Held | None = None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        # A tuple of references beside the response: eight bytes a message.
        size = len(msgspec.json.encode(response)) + 8 * len(messages)
        size += 0 if held is None else held.size
        conversation = tuple(message for _, message in messages)
        new = Stored(response, conversation, size, salt, held, let_go)
        self._of.setdefault(owner, _Responses()).add(response["id"], new, messages)

    def get(
        self,
        response_id: str,
        param: str | None = None,
        owner: str = "",
        salt: str | None = None,
    ) -> Stored:
        """Raises ResponseNotFound, about the field `param`, for one that is not kept. `salt`: the
        one it was made with; None takes any."""
        own = self._of.get(owner)
        found = own.stored.get(response_id) if own else None
        if own is None or found is None or salt not in (None, found.salt):
            raise ResponseNotFound(response_id, param)
        own.stored.move_to_end(response_id)
        return found

    def delete(self, response_id: str, owner: str = "") -> None:
        """Raises ResponseNotFound for one that is not kept."""
        self.get(response_id, owner=owner)
        self._forget(owner, response_id)

    def _shorten_all(self) -> None:
        while len(self) > self._max_responses:
            self._shorten(max(self._of, key=lambda name: len(self._of[name].stored)))
        while self.nbytes > self._max_bytes:
            self._shorten(max(self._of, key=lambda name: self._of[name].nbytes))

    def _shorten(self, owner: str) -> None:
        self._forget(owner, next(iter(self._of[owner].stored)))

    def _forget(self, owner: str, response_id: str) -> None:
        own = self._of[owner]
        unused = own.remove(response_id)
        if self._disk is not None:
            self._disk.remove(response_id, owner, unused)
        if not own.stored:
            del self._of[owner]


@dataclass
class _Message:
    """How many responses have it, its size in bytes and its number on a disk."""

    responses: int
    size: int
    number: int


class _Responses:
    """Those of one key, the one used least recently first, and what they take."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, Stored] = OrderedDict()
        # A message is counted once, and for as long as a response has it: a conversation may
        # outlive the responses that it began with.
        self._shared: dict[int, _Message] = {}
        self.nbytes = 0

    def number(self, message: dict[str, Any]) -> int:
        """0 for one that no response has."""
        found = self._shared.get(id(message))
        return 0 if found is None else found.number

    def add(
        self, response_id: str, new: Stored, messages: list[tuple[int, dict[str, Any]]]
    ) -> None:
        self.stored[response_id] = new
        self.nbytes += new.size
        for number, message in messages:
            shared = self._shared.get(id(message))
            if shared is None:
                size = len(msgspec.json.encode(message))
                shared = self._shared[id(message)] = _Message(0, size, number)
                self.nbytes += size
            shared.responses += 1

    def remove(self, response_id: str) -> list[int]:
        """Returns the numbers of the messages that no other response has."""
        stored = self.stored.pop(response_id)
        stored.let_go()
        self.nbytes -= stored.size
        unused = []
        for message in stored.messages:
            shared = self._shared[id(message)]
            shared.responses -= 1
            if not shared.responses:
                del self._shared[id(message)]
                self.nbytes -= shared.size
                unused.append(shared.number)
        return unused
