"""outlines-core as a backend for compatibility: an index of all states by all tokens, made at once.

Its index drops a token that ends one byte after an accepting state (seen in 0.2.11 to 0.2.14:
`[0-9]+(\\.[0-9]+)?` never lets "." follow "1"). So no state is accepting before the end: each
pattern ends with a sentinel, a code point with its own "token", for the end of the sequence. The
sentinel, U+10FFFF, is a noncharacter that no text holds; sets exclude it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import outlines_core

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.structured.dfa_backend import ENDED, DfaGrammar
from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.lazy_dfa import DEAD, LazyDfa
from rootlace.runtime.structured.regex.lookaround import has_look
from rootlace.runtime.structured.regex.syntax import (
    LAST,
    Chars,
    Literal,
    Regex,
    chars,
    pattern_of,
    with_leaves,
)
from rootlace.runtime.structured.vocabulary import vocabulary as bitmask
from rootlace.runtime.structured.vocabulary.forced_tokens import Canonicalizer
from rootlace.runtime.structured.vocabulary.masks import TokenTable
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint

SENTINEL = chr(LAST)
BYTES_PER_TRANSITION = 64
"""Measured bytes of an index per transition during its build."""


class OutlinesGrammar(DfaGrammar):
    """Regular language on an outlines-core index; see `contracts.matcher.Grammar`. Its matchers
    stand at states of our automaton of the same language, which gives forced text."""

    backend = "outlines_core"

    def __init__(
        self,
        vocabulary: Vocabulary,
        regex: Regex,
        canonicalizer: Canonicalizer,
        config: ConstraintConfig,
    ) -> None:
        """Build the index. Raises InvalidConstraint if outlines-core refuses the pattern or would
        take more than the config's memory, and TooLarge beyond `max_states`."""
        if has_look(regex):
            raise InvalidConstraint("outlines-core: look-around is not supported")
        regex = with_leaves(regex, _without_sentinel)
        dfa = LazyDfa(regex, config.max_states)
        if dfa.empty:
            raise InvalidConstraint("no text matches it")
        transitions = _count_transitions(vocabulary, dfa, config)
        super().__init__(vocabulary, dfa, canonicalizer, config.max_table_bytes)
        pattern = f"(?:{pattern_of(regex)})\\x{{{LAST:X}}}"
        try:
            self._index = outlines_core.Index(pattern, _tokens_of(vocabulary))
        except ValueError as error:
            raise InvalidConstraint(f"outlines-core: {error}") from None
        self._index_bytes = transitions * BYTES_PER_TRANSITION
        # By state of our automaton: a state of the index after the same text.
        self._state_of: dict[int, int] = {dfa.start: self._index.get_initial_state()}
        # Tokens that end in the middle of a character may be on the way to the sentinel.
        begun = tuple(SENTINEL.encode()[:length] for length in (1, 2, 3, 4))
        self._begin_sentinel = [
            token for token, data in enumerate(vocabulary.token_bytes) if data.endswith(begun)
        ]

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._index_bytes

    # ------------------------------------------------------------ answers for matchers

    def write(self, state: int, out: np.ndarray | None) -> bool:
        if not super().write(state, out):
            mask, row = self._mask(state), self.row(state)
            if row is not None:
                self.table.store(row.row, mask)
            if out is not None:
                out[:] = mask
        return True

    def _mask(self, state: int) -> np.ndarray:
        size = self.vocabulary.size
        allowed = np.zeros((size + 31) // 32 * 32, np.bool_)
        tokens = np.array(self._index.get_allowed_tokens(self._state_of[state]), np.int64)
        allowed[tokens[tokens < size]] = True
        for token in self._begin_sentinel:
            allowed[token] &= self.dfa.run(state, self.vocabulary.token_bytes[token]) != DEAD
        allowed[list(self.vocabulary.eos_token_ids)] = (tokens == size).any()
        return bitmask.packed(allowed)

    def step(self, state: int, token_id: int) -> int | None:
        index_state = self._state_of[state]
        if token_id in self.vocabulary.eos_token_ids:
            # The sentinel is the token behind the vocabulary.
            ends = self._index.get_next_state(index_state, self.vocabulary.size) is not None
            return ENDED if ends else DEAD
        following = self._index.get_next_state(index_state, token_id)
        data = self.vocabulary.token_bytes[token_id]
        after = self.dfa.run(state, data) if following is not None else DEAD
        if after != DEAD:
            self._state_of.setdefault(after, following)
        return after


@lru_cache(maxsize=2)
def _tokens_of(vocabulary: Vocabulary) -> Any:
    """Convert the vocabulary to outlines-core's; the sentinel is token `size`."""
    tokens: dict[bytes, list[int]] = {}
    for token, data in enumerate(vocabulary.token_bytes):
        if data:
            tokens.setdefault(data, []).append(token)
    tokens[SENTINEL.encode()] = [vocabulary.size]
    return outlines_core.Vocabulary(vocabulary.size + 1, tokens)


def _count_transitions(vocabulary: Vocabulary, dfa: LazyDfa, config: ConstraintConfig) -> int:
    """Count the transitions of the index on our own automaton, which is visited as a whole."""
    most = config.compile_memory_bytes // BYTES_PER_TRANSITION
    table = TokenTable(vocabulary.trie, (), dfa, 0)
    words = np.zeros(bitmask.words_of(vocabulary.size), np.int32)
    total = state = 0
    while state < dfa.num_states:
        table.write(state, words)
        dfa.transitions(np.array([state]))  # finds the states that no token ends at, too
        total += int(np.unpackbits(words.view(np.uint8)).sum()) + 1
        if total > most:
            raise InvalidConstraint(
                f"outlines-core: its index has more than {most} transitions, which take more than "
                f"{config.compile_memory_bytes >> 20} MiB (compile_memory_bytes)"
            )
        state += 1
    return total


def _without_sentinel(leaf: Literal | Chars) -> Regex:
    if isinstance(leaf, Chars):
        return chars(syntax.intersection(leaf.ranges, ((0, LAST - 1),)))
    if SENTINEL in leaf.text:
        raise InvalidConstraint("outlines-core: U+10FFFF is not supported")
    return leaf
