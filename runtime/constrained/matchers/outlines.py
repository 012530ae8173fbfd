"""outlines-core as a backend for compatibility: an index of all states by all tokens, made at once.

Its index drops a token that ends one byte after an accepting state (seen in 0.2.11 to 0.2.14:
`[0-9]+(\\.[0-9]+)?` never lets "." follow "1"). So nothing here is accepting before the end: each
pattern ends with a sentinel, a code point of its own "token", which stands for the end of the
sequence. The sentinel, U+10FFFF, is a noncharacter that no text holds; sets are without it.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import outlines_core

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.automaton import char_sets
from rootlace.runtime.constrained.automaton.dfa import DEAD, LazyDfa
from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.automaton.syntax import (
    LAST,
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    LookBehind,
    Regex,
    Repeat,
)
from rootlace.runtime.constrained.tokens import bitmask
from rootlace.runtime.constrained.tokens.canonical import Canonicalizer
from rootlace.runtime.constrained.tokens.table import TokenTable
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.plan import AutomatonState, MaskRow
from rootlace.wire.errors import InvalidConstraint

SENTINEL = chr(LAST)
BYTES_PER_TRANSITION = 64
"""Of an index while it is built, as measured."""
_MAX_MASKS = 256


class OutlinesGrammar:
    """A regular language on an outlines-core index; see `interface.Grammar`."""

    backend = "outlines_core"

    def __init__(
        self,
        vocabulary: Vocabulary,
        regex: Regex,
        canonicalizer: Canonicalizer,
        config: ConstraintConfig,
    ) -> None:
        """Raises InvalidConstraint where outlines-core refuses the pattern or would take more than
        the config's memory, and TooLarge beyond `max_states`."""
        dfa = LazyDfa(_without_sentinel(regex), config.max_states)
        if dfa.empty:
            raise InvalidConstraint("no text matches it")
        self.vocabulary = vocabulary
        self.canonicalizer = canonicalizer
        self.dfa = dfa
        transitions = _count_transitions(vocabulary, dfa, config)
        pattern = f"(?:{pattern_of(_without_sentinel(regex))})\\x{{{LAST:X}}}"
        try:
            self.index = outlines_core.Index(pattern, _tokens_of(vocabulary))
        except ValueError as error:
            raise InvalidConstraint(f"outlines-core: {error}") from None
        self.nbytes = transitions * BYTES_PER_TRANSITION
        # Tokens that end in the middle of a character may be on the way to the sentinel.
        begun = tuple(SENTINEL.encode()[:length] for length in (1, 2, 3, 4))
        self._begin_sentinel = [
            token for token, data in enumerate(vocabulary.token_bytes) if data.endswith(begun)
        ]
        self._masks: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def matcher(self) -> OutlinesMatcher:
        return OutlinesMatcher(self)

    def next_state(self, state: int, token_id: int) -> int | None:
        following: int | None = self.index.get_next_state(state, token_id)
        return following

    def accepting(self, state: int) -> bool:
        return self.next_state(state, self.vocabulary.size) is not None

    def mask(self, state: int, byte_state: int) -> np.ndarray:
        """Packed, of a state, which is `byte_state` in our automaton; read-only."""
        with self._lock:
            mask = self._masks.get(state)
            if mask is None:
                size = self.vocabulary.size
                allowed = np.zeros((size + 31) // 32 * 32, np.bool_)
                tokens = np.array(self.index.get_allowed_tokens(state), np.int64)
                allowed[tokens[tokens < size]] = True
                for token in self._begin_sentinel:
                    data = self.vocabulary.token_bytes[token]
                    allowed[token] &= self.dfa.run(byte_state, data) != DEAD
                allowed[list(self.vocabulary.eos_token_ids)] = (tokens == size).any()
                mask = np.packbits(allowed, bitorder="little").view(np.int32)
                if len(self._masks) >= _MAX_MASKS:
                    self._masks.clear()
                self._masks[state] = mask
            return mask


class OutlinesMatcher:
    """See `interface.Matcher`. What is forced, our automaton of the same language says."""

    ready: MaskRow | None = None

    def __init__(self, grammar: OutlinesGrammar) -> None:
        self._grammar = grammar
        self._states: list[int | None] = [grammar.index.get_initial_state()]
        self._bytes = [grammar.dfa.start]
        self._tokens: list[int] = []
        self._error = ""

    def allowed_mask(self) -> np.ndarray:
        words = np.zeros(bitmask.words_of(self._grammar.vocabulary.size), np.int32)
        self.fill_bitmask(words)
        return bitmask.unpacked(words, self._grammar.vocabulary.size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out = bitmask.writable(out, self._grammar.vocabulary.size)
        state = self._states[-1]
        out[:] = 0 if state is None else self._grammar.mask(state, self._bytes[-1])

    def automaton(self) -> AutomatonState | None:
        return None

    def mask_row(self) -> MaskRow | None:
        return None

    def prepare_mask(self) -> None:
        """Nothing: there is no row to fill."""

    def advance(self, token_id: int) -> bool:
        state, byte_state = self._states[-1], self._bytes[-1]
        vocabulary = self._grammar.vocabulary
        after: int | None = None
        if state is not None and token_id in vocabulary.eos_token_ids:
            fits = self._grammar.accepting(state)
        elif state is not None and 0 <= token_id < vocabulary.size:
            after = self._grammar.next_state(state, token_id)
            byte_state = self._grammar.dfa.run(byte_state, vocabulary.token_bytes[token_id])
            fits = after is not None and byte_state != DEAD
        else:
            fits = False
        if not fits:
            count = len(self._tokens)
            self._error = f"the constraint forbids token {token_id} after {count} tokens"
            return False
        self._states.append(after)
        self._bytes.append(byte_state)
        self._tokens.append(token_id)
        self._error = ""
        return True

    def try_advance_fast(self, token_id: int, jumps: bool) -> bool:
        return False

    def is_accepting(self) -> bool:
        state = self._states[-1]
        return state is None or self._grammar.accepting(state)

    def is_finished(self) -> bool:
        state = self._states[-1]
        if state is None:
            return True
        row = self._grammar.dfa.transitions(np.array(self._bytes[-1:]))
        return self._grammar.accepting(state) and not (row >= 0).any()

    def forced_text(self) -> bytes:
        if self._states[-1] is None:
            return b""
        return self._grammar.dfa.forced(self._bytes[-1])[0]

    def forced_tokens(self) -> list[int]:
        if self._states[-1] is None:
            return []
        dfa = self._grammar.dfa
        text, end = dfa.forced(self._bytes[-1])
        return self._grammar.canonicalizer.tokens(
            self._tokens, text, lambda data: dfa.run(end, data) >= 0, dfa.accepting(end)
        )

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot undo {count} of {len(self._tokens)} tokens")
        self._error = ""
        if count:
            del self._states[-count:], self._bytes[-count:], self._tokens[-count:]

    def reset(self) -> None:
        self.rollback(len(self._tokens))

    def can_retreat(self) -> bool:
        return False

    def retreat(self) -> int | None:
        self._error = "the constraint has nothing to check that its mask does not hold"
        return None

    def error(self) -> str:
        return self._error


@lru_cache(maxsize=2)
def _tokens_of(vocabulary: Vocabulary) -> Any:
    """The vocabulary as outlines-core has it; the sentinel is token `size`."""
    tokens: dict[bytes, list[int]] = {}
    for token, data in enumerate(vocabulary.token_bytes):
        if data:
            tokens.setdefault(data, []).append(token)
    tokens[SENTINEL.encode()] = [vocabulary.size]
    return outlines_core.Vocabulary(vocabulary.size + 1, tokens)


def _count_transitions(vocabulary: Vocabulary, dfa: LazyDfa, config: ConstraintConfig) -> int:
    """Of the index to come, counted on our own automaton, all of which is visited for it."""
    most = config.compile_memory_bytes // BYTES_PER_TRANSITION
    table = TokenTable(vocabulary.trie, (), dfa, 0)
    words = np.zeros(bitmask.words_of(vocabulary.size), np.int32)
    total = 0
    seen = {dfa.start}
    waiting = [dfa.start]
    while waiting:
        state = waiting.pop()
        table.write(state, words)
        total += int(np.unpackbits(words.view(np.uint8)).sum()) + 1
        if total > most:
            raise InvalidConstraint(
                f"outlines-core: its index has more than {most} transitions, which take more than "
                f"{config.compile_memory_bytes >> 20} MiB (compile_memory_bytes)"
            )
        row = dfa.transitions(np.array([state]))[0]
        for following in np.unique(row[row >= 0]).tolist():
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return total


def _without_sentinel(regex: Regex) -> Regex:
    match regex:
        case Literal(text):
            if SENTINEL in text:
                raise InvalidConstraint("outlines-core: U+10FFFF is not supported")
            return regex
        case Chars(ranges):
            return Chars(char_sets.intersection(ranges, ((0, LAST - 1),)))
        case Concat(parts):
            return Concat(tuple(map(_without_sentinel, parts)))
        case Either(options):
            return Either(tuple(map(_without_sentinel, options)))
        case Repeat(item, least, most):
            return Repeat(_without_sentinel(item), least, most)
        case Look() | LookBehind():
            raise InvalidConstraint("outlines-core: look-around is not supported")
