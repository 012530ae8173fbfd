"""Responses that later requests may go on from, as many as fit in bounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from rootlace.runtime.gateway.http.errors import ResponseNotFound

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Stored:
    """A response as it was given, and the conversation up to its end.

    Messages are shared with the responses before it; `size` is what it adds, in bytes.
    """

    response: dict[str, Any]
    messages: tuple[dict[str, Any], ...]
    size: int
    owner: str = ""


class ResponseStore:
    """The latest responses by id. What was used least recently is forgotten first.

    Their prefixes are in the tree like those of any request, and are evicted like them: to go on
    from a response then costs computing, and nothing else.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self,
        response: dict[str, Any],
        before: tuple[dict[str, Any], ...],
        new: list[dict[str, Any]],
        owner: str = "",
    ) -> None:
        """Keep a response to the messages `before` and `new`, the last of which is its answer.

        `owner` is the name of the API key; with another one it is not found.
        """
        # A tuple of references beside the texts: eight bytes a message.
        size = len(msgspec.json.encode([response, new])) + 8 * len(before)
        self._stored[response["id"]] = Stored(response, (*before, *new), size, owner)
        self._bytes += size
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._bytes -= oldest.size

    def get(self, response_id: str, param: str | None = None, owner: str = "") -> Stored:
        """Raises ResponseNotFound, about the field `param`, for one that is not kept."""
        found = self._stored.get(response_id)
        if found is None or found.owner != owner:
            raise ResponseNotFound(response_id, param)
        self._stored.move_to_end(response_id)
        return found

    def delete(self, response_id: str, owner: str = "") -> None:
        """Raises ResponseNotFound for one that is not kept."""
        self.get(response_id, owner=owner)
        self._bytes -= self._stored.pop(response_id).size
