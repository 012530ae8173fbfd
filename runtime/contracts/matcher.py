"""Protocols of every constraint backend: a compiled `Grammar`, and one `Matcher` per request.

matcher = grammar.matcher()
while not matcher.is_finished():
    token = sample(logits, matcher.allowed_mask())
    matcher.advance(token)
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from rootlace.runtime.contracts.plan import AutomatonState, MaskRow


class Place:
    """Facts known of a place in a text without a matcher. Requests may share places."""

    __slots__ = ("mask", "unfinished", "unforced")

    def __init__(self, *, unfinished: bool = False, unforced: bool = False) -> None:
        self.mask: MaskRow | None = None
        """The row that `Matcher.mask_row` would name, if known to be filled."""
        self.unfinished = unfinished
        """Whether `Matcher.is_finished` is known to be False."""
        self.unforced = unforced
        """Whether `Matcher.forced_tokens` is known to be empty."""


UNKNOWN = Place()


class Matcher(Protocol):
    """The state of one request in its constraint. Not thread-safe; one per request.

    Token ids are the model's. "The text" is the bytes of the tokens taken in so far, with special
    tokens, which have no bytes (only structural tags allow special tokens). By default a matcher
    has no shared masks and no automaton, and `advance` refuses no token that the mask allowed.
    """

    place: Place = UNKNOWN
    """The place behind the text."""
    free: bool = False
    """Whether any token may follow from here on: the request needs no matcher any more."""
    can_rollback: bool = False
    """Whether `advance` may refuse a token that the mask allowed (a checked constraint)."""

    def allowed_mask(self) -> np.ndarray:
        """bool [vocab_size]: the tokens that may come next.

        End-of-sequence tokens are allowed exactly where the text is complete (`is_accepting`).
        """

    def fill_bitmask(self, out: np.ndarray) -> None:
        """Write `allowed_mask` packed: contiguous int32 [ceil(vocab_size / 32)].

        Bit i of word w is token 32w + i; bits beyond the vocabulary are 0. May run on another
        thread than the other methods, but never beside one of them. All 0 after the end of the
        sequence, and where the mask exceeds the constraint's bounds (then `error` says so): nothing
        can follow. `out` may be a torch tensor on the CPU. Raises ValueError (TypeError) if `out`
        does not fit.
        """

    def mask_row(self) -> MaskRow | None:
        """Return the row of a shared table with this state's packed mask, filled by `prepare_mask`
        at the latest. None if the mask must be filled for this request alone."""
        return None

    def prepare_mask(self) -> None:
        """Fill the row of `mask_row`, unless filled; threads as for `fill_bitmask`.

        A mask that exceeds the constraint's bounds may stay unfilled.
        """
        return

    def automaton(self) -> AutomatonState | None:
        """Return the text's state in an automaton that a device can advance by itself.

        Masks and steps equal those of `fill_bitmask` and `advance`, except that the end of the
        sequence leads to a dead state. None without an automaton, or before it is built: the first
        call starts the build on another thread.
        """
        return None

    def advance(self, token_id: int) -> bool:
        """Take a token in. False if the constraint forbids the token.

        After False nothing has changed, except that `error` gives the reason. An end-of-sequence
        token is taken where the text is complete; afterwards only `rollback` and `reset` are
        useful.
        """

    def ignores(self, token_id: int) -> bool:
        """Return whether this stop token would end nothing here, within thoughts."""
        return False

    def is_accepting(self) -> bool:
        """Return whether the text is complete."""

    def is_finished(self) -> bool:
        """Return whether the text is complete and only the end of the sequence can follow."""

    def forced_text(self) -> bytes:
        """Return bytes that every complete text goes on with (empty where the text may end here).

        Perhaps not all forced bytes, but never an unforced one, nor one behind a special token.
        """

    def forced_tokens(self) -> list[int]:
        """Return the next tokens of the canonical tokenization of every complete text.

        Special tokens are included. The list ends where texts differ; see `canonical`. The tokens
        are not taken in.
        """

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens and later failures, as if never tried.

        Raises ValueError if there are fewer tokens.
        """

    def reset(self) -> None:
        """Undo all tokens, and lift the exclusions of `rollback_refused`."""

    def settled(self) -> int:
        """Count of leading tokens that no `rollback_refused` undoes, if `can_rollback`."""
        return 0

    def rollback_refused(self) -> int | None:
        """Exclude a token that the mask allowed and `advance` refused; roll back to the nearest
        alternative.

        Returns the count of undone tokens (0: only the refused token is sampled again). Returns
        None if no alternative is left or the tries are used up; then `error` says so.
        """

    def error(self) -> str:
        """Why the last `advance`, `rollback_refused` or mask failed; empty otherwise."""


class Grammar(Protocol):
    """A compiled constraint, shared by all requests with the same constraint. Thread-safe."""

    @property
    def backend(self) -> str:
        """Name: "automaton", "llguidance", "outlines_core", or one of these with "+checked"."""

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of the text."""
