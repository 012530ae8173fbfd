"""Responses that later requests may go on from, as many as fit in bounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rootlace.runtime.gateway.http.chat.held import Held
from rootlace.runtime.gateway.http.errors import ResponseNotFound

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
        messages = (*before, *new)
        # A tuple of references beside the response: eight bytes a message.
        size = len(msgspec.json.encode(response)) + 8 * len(messages)
        size += 0 if held is None else held.size
        own = self._of.setdefault(owner, _Responses())
        own.add(response["id"], Stored(response, messages, size, salt, held, let_go))
        while len(self) > self._max_responses:
            self._shorten(max(self._of, key=lambda name: len(self._of[name].stored)))
        while self.nbytes > self._max_bytes:
            self._shorten(max(self._of, key=lambda name: self._of[name].nbytes))

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

    def _shorten(self, owner: str) -> None:
        self._forget(owner, next(iter(self._of[owner].stored)))

    def _forget(self, owner: str, response_id: str) -> None:
        own = self._of[owner]
        own.remove(response_id)
        if not own.stored:
            del self._of[owner]


class _Responses:
    """Those of one key, the one used least recently first, and what they take."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, Stored] = OrderedDict()
        # How many responses have a message, and its size. It is counted once, and for as long as
        # one of them is kept: a conversation may outlive the responses that it began with.
        self._shared: dict[int, tuple[int, int]] = {}
        self.nbytes = 0

    def add(self, response_id: str, new: Stored) -> None:
        self.stored[response_id] = new
        self.nbytes += new.size
        for message in new.messages:
            count, size = self._shared.get(id(message), (0, 0))
            if not count:
                size = len(msgspec.json.encode(message))
                self.nbytes += size
            self._shared[id(message)] = (count + 1, size)

    def remove(self, response_id: str) -> None:
        stored = self.stored.pop(response_id)
        stored.let_go()
        self.nbytes -= stored.size
        for message in stored.messages:
            count, size = self._shared.pop(id(message))
            if count > 1:
                self._shared[id(message)] = (count - 1, size)
            else:
                self.nbytes -= size
