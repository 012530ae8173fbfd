"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterable, Sequence
from typing import NotRequired, TypedDict, TypeVar, cast

import msgspec

from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.protocol import Generated, TokenLogprob

T = TypeVar("T")

# JSON has no infinity; this is what OpenAI writes for "impossible".
IMPOSSIBLE = -9999.0
PART_ROWS = 256
"""Rows per part, of up to 129 log-probabilities each."""


class TokenReply(TypedDict):
    """Token, its text as bytes, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(TokenReply):
    """Token of an answer, with its best alternatives; `forced` if a constraint left no other.
    `drafted` names the source of a drafted token."""

    top_logprobs: list[TokenReply]
    forced: NotRequired[bool]
    drafted: NotRequired[str]


class ChatLogprobs(TypedDict):
    """Log-probabilities of an answer, or of a piece of it."""

    content: list[ChosenToken]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion, or of a piece of it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def rows_of(results: Iterable[Generated]) -> int:
    """Count the log-probabilities in results, alternatives included."""
    return sum(
        len(tokens) * (1 + len(tokens[-1].top))
        for result in results
        for tokens in (result.prompt_logprobs, *(output.logprobs for output in result.outputs))
        if tokens
    )


def in_parts(rows: list[T]) -> list[T]:
    """Encode a long list part by part: other threads wait while its encoder runs."""
    if len(rows) <= PART_ROWS:
        return rows
    starts = range(0, len(rows), PART_ROWS)
    parts = [msgspec.json.encode(rows[start : start + PART_ROWS])[1:-1] for start in starts]
    return cast(list[T], msgspec.Raw(b"[" + b",".join(parts) + b"]"))


def finite(logprob: float) -> float:
    return max(logprob, IMPOSSIBLE)


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], top: int) -> ChatLogprobs:
    """Return `logprobs` of a chat choice."""
    return {"content": in_parts(chosen_tokens(tokenizer, tokens, top)), "refusal": None}


def chosen_tokens(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], top: int
) -> list[ChosenToken]:
    """Return one entry per token, with its `top` best alternatives. Forced tokens have `forced`,
    and drafted tokens `drafted`."""
    content = []
    for token in tokens:
        best = [_entry(tokenizer, at, text, logprob) for at, logprob, text in token.top[:top]]
        entry = _entry(tokenizer, token.token_id, token.text, token.logprob)
        chosen = cast(ChosenToken, {**entry, "top_logprobs": best})
        if token.forced:
            chosen["forced"] = True
        if token.drafted:
            chosen["drafted"] = token.drafted
        content.append(chosen)
    return content


def _entry(tokenizer: Tokenizer, token_id: int, text: str, logprob: float | None) -> TokenReply:
    return {
        "token": _part(tokenizer, token_id, text) or text,
        "logprob": IMPOSSIBLE if logprob is None else finite(logprob),
        "bytes": list(_bytes(tokenizer, token_id, text)),
    }


def _part(tokenizer: Tokenizer, token_id: int, text: str) -> str:
    """Return a token that is part of a character as OpenAI writes its bytes (`\\xf0\\x9f`); "" for
    other tokens. All such tokens have the same text, which could not tell them apart."""
    if "\ufffd" not in text:
        return ""
    data = tokenizer.token_bytes[token_id]
    with contextlib.suppress(UnicodeDecodeError):
        data.decode()
        return ""
    return "".join(chr(one) if 32 <= one < 127 else f"\\x{one:02x}" for one in data)


def _bytes(tokenizer: Tokenizer, token_id: int, text: str) -> bytes:
    # A token may be a part of a character; then its text is U+FFFD, but its bytes are known.
    return tokenizer.token_bytes[token_id] if "\ufffd" in text else text.encode()


class TextOffsets:
    """Beginnings of the tokens of a growing text, in characters.

    A token that only continues a character begins behind the last complete one. `start` is the
    place of the first token. `start` is negative for a prompt that begins with tokens without text
    (BOS), at place 0.
    """

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        self.tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = start

    def of(self, tokens: Sequence[TokenLogprob]) -> list[int]:
        """Return the places of the next tokens."""
        places = []
        for token in tokens:
            places.append(max(self._next, 0))
            self._next += len(self._utf8.decode(_bytes(self.tokenizer, token.token_id, token.text)))
        return places


def text_length(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> int:
    """Count the characters of the tokens together."""
    data = b"".join(_bytes(tokenizer, token.token_id, token.text) for token in tokens)
    return len(data.decode("utf-8", "replace"))


def completion_logprobs(
    tokens: Sequence[TokenLogprob], top: int, offsets: TextOffsets
) -> CompletionLogprobs:
    """Return `logprobs` of a completion choice.

    A token is among its alternatives even if it is not one of the best. The value under its text is
    its own; of alternatives with the same text the more probable one stays.
    """

    def name(token_id: int, text: str) -> str:
        part = _part(offsets.tokenizer, token_id, text)
        return f"bytes:{part}" if part else text

    def alternatives(token: TokenLogprob) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for token_id, logprob, text in token.top[:top]:
            found.setdefault(name(token_id, text), finite(logprob))
        found[name(token.token_id, token.text)] = finite(token.logprob)
        return found

    return {
        "tokens": in_parts([name(token.token_id, token.text) for token in tokens]),
        "token_logprobs": in_parts(
            [None if t.logprob is None else finite(t.logprob) for t in tokens]
        ),
        "top_logprobs": in_parts([alternatives(token) for token in tokens]) if top else None,
        "text_offset": in_parts(offsets.of(tokens)),
    }
