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

    Messages are shared with the responses before it; `size` is in bytes and without them. `owner`
    is the name of the API key, and `salt` that of the namespace which has the conversation's KV.
    `held` is the branch, and `let_go` has the cache treat it like any other.
    """

    response: Mapping[str, Any]
    messages: tuple[dict[str, Any], ...]
    size: int
    owner: str = ""
    salt: str = ""
    held: Held | None = None
    let_go: Callable[[], None] = lambda: None


class ResponseStore:
    """The latest responses by id. What was used least recently is forgotten first."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        # How many responses have a message, and its size. It is counted once, and for as long as
        # one of them is kept: a conversation may outlive the responses that it began with.
        self._shared: dict[int, tuple[int, int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

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
        self._stored[response["id"]] = Stored(response, messages, size, owner, salt, held, let_go)
        self._bytes += size
        for message in messages:
            count, size = self._shared.get(id(message), (0, 0))
            if not count:
                size = len(msgspec.json.encode(message))
                self._bytes += size
            self._shared[id(message)] = (count + 1, size)
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            self._forget(next(iter(self._stored)))

    def get(
        self,
        response_id: str,
        param: str | None = None,
        owner: str = "",
        salt: str | None = None,
    ) -> Stored:
        """Raises ResponseNotFound, about the field `param`, for one that is not kept. `salt`: the
        one it was made with; None takes any."""
        found = self._stored.get(response_id)
        if found is None or found.owner != owner or salt not in (None, found.salt):
            raise ResponseNotFound(response_id, param)
        self._stored.move_to_end(response_id)
        return found

    def delete(self, response_id: str, owner: str = "") -> None:
        """Raises ResponseNotFound for one that is not kept."""
        self.get(response_id, owner=owner)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)
        stored.let_go()
        self._bytes -= stored.size
        for message in stored.messages:
            count, size = self._shared.pop(id(message))
            if count > 1:
                self._shared[id(message)] = (count - 1, size)
            else:
                self._bytes -= size
