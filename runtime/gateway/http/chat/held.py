"""What later requests of a conversation may go on from: its text so far, and the tokens of that."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rootlace.runtime.gateway.tokens.pieces import Joined, Piece
from rootlace.wire.protocol import Output, Part, SamplingParams, Text


@dataclass(frozen=True)
class Written:
    """A prompt: the text of its template and contents, and the tokens of that."""

    text: Joined
    ids: Sequence[int]


@dataclass(eq=False)
class Held:
    """A prompt and its answer as the branch had them.

    `ids` are their tokens, the answer's as the model gave them. A prompt goes on from here if it
    begins with the same text: the first `prompt` characters as the same runs of template and
    content, and the answer up to the character `end`, whatever the template takes it for.
    """

    ids: array[int]
    prompt: int
    end: int
    digest: bytes

    @classmethod
    def behind(cls, written: Written, output: Output, params: SamplingParams) -> Held | None:
        """None where the answer's text is not just that of its tokens: a stop string cut it."""
        if isinstance(output.matched, str):
            return None
        ended = output.matched is not None and not params.no_stop_trim
        ids = output.token_ids[:-1] if ended else output.token_ids
        prompt = len(written.text.text)
        return cls(
            array("i", [*written.ids, *ids]),
            prompt,
            prompt + len(output.text),
            _digest(written.text, prompt, written.text.text + output.text),
        )

    @property
    def size(self) -> int:
        """In bytes."""
        return self.ids.itemsize * len(self.ids)

    def rest(self, text: Joined) -> tuple[Piece, ...] | None:
        """What of a prompt comes behind this; None if it does not begin so."""
        if len(text.text) <= self.end or (
            _digest(text, self.prompt, text.text[: self.end]) != self.digest
        ):
            return None
        return text.after(self.end)


def pieces_of(parts: Iterable[Part]) -> list[Piece]:
    """The texts among the parts."""
    return [Piece(part.text, part.special) for part in parts if isinstance(part, Text)]


def _digest(text: Joined, prompt: int, characters: str) -> bytes:
    """Of `characters`, and of which runs the first `prompt` of them are."""
    inside = [border for border in text.borders if border < prompt]
    runs = (inside, text.flags[: len(inside) + 1])
    digest = hashlib.blake2b(ascii(runs).encode(), digest_size=16)
    digest.update(characters.encode())
    return digest.digest()
