"""What a constraint lets follow a text, asked for no more often than needed."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

from rootlace.runtime.structured.vocabulary.pretokens import Continuation
from rootlace.runtime.structured.vocabulary.vocabulary import first_bytes_of


class Following:
    """Answers about the texts that may come behind a place; one place, one call, then forgotten.

    Where it does not know it says yes: what may follow is never underestimated.
    """

    def __init__(
        self, can_follow: Callable[[bytes], bool] | None, may_end: bool, pending: bytes = b""
    ) -> None:
        """`can_follow` is asked about what comes behind `pending`, which is sure to come first.
        None: anything may follow."""
        self._can_follow = can_follow
        self._pending = pending
        self._known: dict[bytes, bool] = {}
        self._categories: dict[tuple[bytes, str], bool] = {}
        self.may_end = may_end and not pending

    def __call__(self, text: bytes) -> bool:
        """Whether some complete text goes on with `text`."""
        if self._can_follow is None:
            return True
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._ask(text)
        return known

    def shortest_forbidden(self, text: bytes) -> int | None:
        """The length of the shortest beginning of `text` that cannot follow; None if it can."""
        if self(text):
            return None
        return next(n for n in range(1, len(text) + 1) if not self(text[:n]))

    def allows(self, continuation: Continuation) -> bool:
        """Whether a text that begins with such characters may follow. Of characters beyond ASCII
        only the first byte is asked for."""
        return self._allows(continuation, b"")

    def joins(self, prefixes: list[bytes]) -> bool:
        """Whether a text that begins with one of these bytes (two each) may follow."""
        leads = {prefix[:1] for prefix in prefixes}
        allowed = {lead for lead in leads if self(lead)}
        return any(prefix[:1] in allowed and self(prefix) for prefix in prefixes)

    def _ask(self, text: bytes) -> bool:
        assert self._can_follow is not None
        pending = self._pending
        if len(text) <= len(pending):
            return pending.startswith(text)
        return text.startswith(pending) and self._can_follow(text[len(pending) :])

    def _allows(self, continuation: Continuation, before: bytes) -> bool:
        if not continuation or continuation[0] is None:
            return True
        for character in continuation[0]:
            if character < "\x80":
                text = before + character.encode()
                if self(text) and self._allows(continuation[1:], text):
                    return True
            elif self._category(unicodedata.category(character), before):
                return True
        return False

    def _category(self, category: str, before: bytes) -> bool:
        """Whether a character beyond ASCII of this category may follow `before`; and maybe so where
        it may not."""
        found = self._categories.get((before, category))
        if found is None:
            first = first_bytes_of(category)
            found = any(self(before + bytes((byte,))) for byte in first)
            self._categories[before, category] = found
        return found
