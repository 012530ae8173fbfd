"""What every constraint backend offers: a compiled `Grammar`, and one `Matcher` per request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from rootlace.runtime.contracts.plan import AutomatonState, MaskRow


class Matcher(Protocol):
    """Where one request stands in its constraint. Not thread-safe; one per request.

    Token ids are the model's. "The text" is the bytes of the tokens taken in so far, and the
    special tokens among them, which have none (only structural tags allow any). A kind of matcher
    that derives from this has no shared masks and no automaton, and its `advance` refuses
    nothing that the mask allowed, unless it says otherwise.
    """

    ready: MaskRow | None = None
    """The row that `mask_row` would name, if it is known to be filled; else None. Cheap to read."""

    def allowed_mask(self) -> np.ndarray:
        """bool [vocab_size]: the tokens that may come next.

        End-of-sequence tokens are among them exactly where the text is complete (`is_accepting`).
        """

    def fill_bitmask(self, out: np.ndarray) -> None:
        """Write `allowed_mask` packed: contiguous int32 [ceil(vocab_size / 32)], bit i of word w
        is token 32w + i. Bits beyond the vocabulary are 0. May run on another thread than the other
        methods, but never while one of them runs. All 0 after the end of the sequence, and where
        the mask exceeds the constraint's bounds (then `error` says so): nothing can follow.
        `out` may be a torch tensor on the CPU. Raises ValueError (TypeError) where it does not fit.
        """

    def mask_row(self) -> MaskRow | None:
        """The row of a shared table that holds this state's packed mask (or will, after
        `prepare_mask`); None if the mask must be filled for this request alone."""
        return None

    def prepare_mask(self) -> None:
        """Fill the row that `mask_row` names, if it is not yet; threads as for `fill_bitmask`.
        A mask that exceeds the constraint's bounds may stay unfilled."""
        return

    def automaton(self) -> AutomatonState | None:
        """The text's state in an automaton that a device can step by itself. Its masks and steps
        are those of `fill_bitmask` and `advance`, except that the end of the sequence leads to a
        dead state. None if there is none, or none yet: asking starts making it, on another thread.
        """
        return None

    def advance(self, token_id: int) -> bool:
        """Take a token in. False if the constraint forbids it; then nothing has changed, except
        that `error` says why. An end-of-sequence token is taken where the text is complete; after
        it only `rollback` and `reset` are of use."""

    def try_advance_fast(self, token_id: int, jumps: bool) -> bool:
        """`advance` for the common case, as cheap as can be: take in a token that the mask allowed
        if it plainly neither completes the text nor (with `jumps`) leads to where tokens are
        forced. Otherwise False, and nothing has changed: ask `advance` and the others.
        `token_id` is one of the vocabulary."""
        return False

    def ignores(self, token_id: int) -> bool:
        """Whether this stop token would end nothing here: within thoughts."""
        return False

    def is_free(self) -> bool:
        """Whether anything may come from here on: the request needs no matcher any more."""
        return False

    def is_accepting(self) -> bool:
        """Whether the text is complete."""

    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can follow but the end of the sequence."""

    def forced_text(self) -> bytes:
        """The bytes that every complete text goes on with (empty where it may end here).

        Not necessarily all of them, but never a byte that is not forced, nor one behind a special
        token.
        """

    def forced_tokens(self) -> list[int]:
        """The next tokens of the canonical tokenization of every complete text, special ones
        included, as far as they are the same in all of them; see `canonical`. Does not take them
        in."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens taken in, and what failed behind them: it is as if they had
        not been tried. Raises ValueError if there are fewer."""

    def reset(self) -> None:
        """Undo all tokens and forget what `rollback_refused` excluded."""

    def can_rollback(self) -> bool:
        """Whether `advance` may refuse a token that the mask allowed (a checked constraint)."""
        return False

    def settled(self) -> int:
        """How many of the tokens taken in no `rollback_refused` undoes, where it `can_rollback`."""
        return 0

    def rollback_refused(self) -> int | None:
        """After `advance` refused a token that the mask allowed: exclude it where it was tried, go
        back to the nearest place where something else can follow, and say how many tokens taken in
        were undone for that (0: only the refused one is to be drawn again). None if there is no
        such place or the tries are used up; then `error` says so."""

    def error(self) -> str:
        """Why the last `advance`, `rollback_refused` or mask failed; empty otherwise."""


class Grammar(Protocol):
    """A compiled constraint, shared by all requests that ask for it. Thread-safe."""

    @property
    def backend(self) -> str:
        """ "automaton", "llguidance", "outlines_core", or one of these with "+checked"."""

    @property
    def nbytes(self) -> int:
        """About the memory it takes now."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of the text."""


class ForcedTokenizer(Protocol):
    """Turns forced text into forced tokens; `canonical.Canonicalizer` is one and says how."""

    def tail(self, context: list[int]) -> bytes | None:
        """What `tokens_after` needs to know of the tokens before; None: no text can be forced."""

    def tokens_after(
        self,
        tail: bytes | None,
        forced: bytes,
        can_follow: Callable[[bytes], bool],
        may_end: bool,
    ) -> list[int]:
        """The tokens that every tokenization of `forced`, and of whatever may follow it, begins
        with. `can_follow` says whether bytes can come behind it, `may_end` whether the text may
        end there."""
