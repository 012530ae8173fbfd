"""Constraints on llguidance: an Earley parser over a lazily built lexer, masks per request."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Matcher
from rootlace.runtime.contracts.plan import MaskRow
from rootlace.runtime.structured.dfa_backend import BEYOND, DfaGrammar
from rootlace.runtime.structured.json_schema.writers import MARK
from rootlace.runtime.structured.regex.lazy_dfa import DEAD, LazyDfa
from rootlace.runtime.structured.regex.syntax import TooLarge
from rootlace.runtime.structured.vocabulary import vocabulary as bitmask
from rootlace.runtime.structured.vocabulary.forced_tokens import Canonicalizer
from rootlace.runtime.structured.vocabulary.masks import TokenWalk
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint

# Llguidance lexer ---------------------------------------------------------------------------------
#
# A lexer of llguidance, shared by many requests, and replaced when worn out.


_WORN = ("too many states", "too many expressions")
"""Beginnings of llguidance's errors that stay with a lexer, and so with all matchers that share it:
too many states, or too much work for one mask."""
REPLAYED = 32
"""Most tokens that a new lexer takes in at once: its budget runs from one mask to the next."""


def mask_of(matcher: LLMatcher, vocabulary_size: int) -> np.ndarray:
    """Return the packed mask, int32; without meaning if the matcher has an error afterwards."""
    words = np.zeros(bitmask.words_of(vocabulary_size), np.int32)
    matcher.unsafe_compute_mask_ptr(bitmask.address(words), words.nbytes)
    return words


class SharedLexer:
    """Holder of the prototype that requests copy. Thread-safe.

    Copies share one lexer with all states that any copy reached. When the lexer is full, requests
    must not fail for states that other requests left.
    """

    def __init__(self, build: Callable[[], LLMatcher]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._prototype: LLMatcher | None = None

    def prototype(self, worn: LLMatcher | None = None) -> LLMatcher:
        """Return the matcher to copy; a new one instead of `worn`."""
        with self._lock:
            if self._prototype is None or self._prototype is worn:
                self._prototype = self._build()
            return self._prototype

    def discard(self, worn: LLMatcher) -> None:
        """Replace the prototype `worn` when a request next needs a prototype."""
        with self._lock:
            if self._prototype is worn:
                self._prototype = None


class Parser:
    """Parser of one request: `matcher`, a copy of the prototype, has accepted `tokens`."""

    def __init__(self, lexer: SharedLexer, vocabulary_size: int) -> None:
        self._lexer = lexer
        self._size = vocabulary_size
        self._prototype = lexer.prototype()
        self.matcher = self._prototype.deep_copy()
        self.tokens: list[int] = []

    def copy(self) -> Parser:
        """Return another parser at the same place."""
        other = Parser.__new__(Parser)
        other._lexer, other._size, other._prototype = self._lexer, self._size, self._prototype
        other.matcher, other.tokens = self.matcher.deep_copy(), self.tokens.copy()
        return other

    def fill_bitmask(self, out: np.ndarray) -> None:
        """Fill a packed mask, which has no meaning if the matcher has an error afterwards."""
        self.matcher.unsafe_compute_mask_ptr(bitmask.address(out), out.nbytes)
        if _is_worn(self.matcher) and self._replay():
            self.matcher.unsafe_compute_mask_ptr(bitmask.address(out), out.nbytes)
            self._leave_if_worn()

    def take(self, token_id: int) -> bool:
        """Accept a token if the grammar allows it; return whether it did."""
        taken: bool = self.matcher.try_consume_tokens([token_id]) == 1
        # A refused token is no error; an error is always one of bounds.
        if not taken and _is_worn(self.matcher) and self._replay():
            taken = self.matcher.try_consume_tokens([token_id]) == 1
            self._leave_if_worn()
        if taken:
            self.tokens.append(token_id)
        return taken

    def undo(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]
        if self.matcher.is_error():  # then it cannot roll back
            self._replay()
        elif count:
            self.matcher.rollback(count)

    def _replay(self) -> bool:
        """Reach the same place with another matcher, on another lexer if this one is worn out.
        Returns False, with nothing changed, if that would not help."""
        prototype = self._lexer.prototype(worn=self._prototype if _is_worn(self.matcher) else None)
        matcher = prototype.deep_copy()
        for start in range(0, len(self.tokens), REPLAYED):
            part = self.tokens[start : start + REPLAYED]
            if matcher.try_consume_tokens(part) != len(part):
                if _is_worn(matcher):
                    self._lexer.discard(prototype)
                return False
            mask_of(matcher, self._size)
        self._prototype, self.matcher = prototype, matcher
        return True

    def _leave_if_worn(self) -> None:
        """Give the next request another lexer if this text wears out even a new one."""
        if _is_worn(self.matcher):
            self._lexer.discard(self._prototype)


def _is_worn(matcher: LLMatcher) -> bool:
    return matcher.is_error() and any(kind in matcher.get_error() for kind in _WORN)


# Llguidance ---------------------------------------------------------------------------------------


# Measured bytes of a grammar's parser and lexer: a base, and a part per character of its source.
BASE_BYTES = 1 << 14
BYTES_PER_CHARACTER = 96

REMEMBERED = 1024
"""Most places with forced text remembered per grammar."""
_Place = tuple[bytes, bytes, bool, bytes]
_MARK = b"\xff"
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")
"""llguidance's spelling of special tokens among bytes; no text has the mark."""
_Run = bytes | int
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Option for a grammar. Without the option llguidance would allow, for forced bytes, only the token
that it would choose itself."""


class LLGuidanceGrammar:
    """Grammar in llguidance's Lark dialect; see `contracts.matcher.Grammar`."""

    backend = "llguidance"

    def __init__(
        self,
        vocabulary: Vocabulary,
        lark: str,
        canonicalizer: Canonicalizer,
        config: ConstraintConfig,
        special: frozenset[int] = frozenset(),
    ) -> None:
        """Make a grammar. `special`: the special tokens that a text may hold. Raises
        InvalidConstraint with llguidance's reason. Drops the GIL while it works."""
        self.vocabulary = vocabulary
        self.special = special
        self.canonicalizer = canonicalizer
        source, limits = LLMatcher.grammar_from_lark(lark + _NO_FORCING), parser_limits(config)
        self._forced: dict[_Place, _Forced] = {}
        self.beginning: tuple[int, ...] | None = None
        """Forced tokens at the beginning of the text; None until a matcher asks."""
        self.lexer = SharedLexer(
            lambda: LLMatcher(vocabulary.llguidance, source, log_level=0, limits=limits)
        )
        prototype = self.lexer.prototype()
        if prototype.is_error():
            raise InvalidConstraint(reason(prototype))
        # llguidance reports a dead end only after a token, and an empty language only at the first
        # mask.
        mask = mask_of(prototype, vocabulary.size)
        if prototype.is_error():
            raise InvalidConstraint(reason(prototype))
        accepting = prototype.is_accepting()
        self._check_beginning(prototype)
        begins = bitmask.unpacked(mask, vocabulary.size)
        begins[list(vocabulary.eos_token_ids)] = False
        if not begins.any() and not accepting:
            raise InvalidConstraint("no text satisfies it")
        self.empty_only = not begins.any() and accepting
        self.nbytes = BASE_BYTES + BYTES_PER_CHARACTER * len(lark)

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self)

    def forced_after(self, tail: bytes, text: bytes, following: _Following) -> list[int]:
        """Return the canonicalizer's tokens. They depend only on the answers to its questions, so
        equal answers give equal tokens."""
        key = (tail, text, following.may_end, following.digest())
        known = self._forced.get(key)
        if known is not None and following.agrees(known.answers):
            if known.settled:
                return list(known.tokens)
            # The canonicalizer asks fewer questions about a known text.
            following.answers.clear()
        tokens = self.canonicalizer.tokens_after(tail, text, following, following.may_end)
        self._remember(key, _Forced(following.answered(), tuple(tokens), known is not None))
        return tokens

    def closed(self, tail: bytes | None, text: bytes) -> tuple[int, ...]:
        """Return the canonicalizer's tokens of a text with a special token behind the text."""
        key = (tail or b"", text, True, b"")
        known = self._forced.get(key)
        if known is None:
            tokens = self.canonicalizer.tokens_after(tail, text, lambda _: False, True)
            known = self._remember(key, _Forced([], tuple(tokens), True))
        return known.tokens

    def _remember(self, key: _Place, found: _Forced) -> _Forced:
        if len(self._forced) >= REMEMBERED:
            self._forced.clear()
        self._forced[key] = found
        return found

    def _check_beginning(self, prototype: LLMatcher) -> None:
        """Raise InvalidConstraint if a bound is met right behind the common beginning of all texts,
        as behind the brace of a large object: better now than in the middle of requests."""
        trial = prototype.deep_copy()
        beginning = trial.compute_ff_bytes()
        tokens = _path(_runs(beginning), self.vocabulary)
        if trial.is_error() or len(beginning) > REPLAYED:
            # A long text may fill one lexer, and is served by several in turn.
            self.lexer.discard(prototype)
            return
        if not tokens:
            return
        trial.try_consume_tokens(tokens)
        mask_of(trial, self.vocabulary.size)
        if trial.is_error():
            raise InvalidConstraint(reason(trial))


class _Forced(msgspec.Struct, frozen=True):
    """Forced tokens for one list of questions with these answers."""

    answers: list[tuple[list[int] | None, bool]]
    """Requested texts, in tokens of one byte each, with the answers."""
    tokens: tuple[int, ...]
    settled: bool
    """Whether every question was necessary."""


class _Following:
    """Answers about the texts that can follow at a matcher, which must not move meanwhile.

    Most texts in question are tokens, and one mask answers for all tokens. Other answers are in
    `answers`.
    """

    def __init__(self, matcher: LLMatcher, grammar: LLGuidanceGrammar) -> None:
        self._matcher = matcher
        self._vocabulary = grammar.vocabulary
        mask = mask_of(matcher, grammar.vocabulary.size)
        self._bits = mask.view(np.uint8).tobytes()
        special = grammar.special and (mask & grammar.vocabulary.special_mask).any()
        self.may_end: bool = matcher.is_accepting() or bool(special)
        """Whether the text may end: the sequence ends, or a special token follows."""
        self.answers: dict[bytes, bool] = {}

    def digest(self) -> bytes:
        """Return a digest of the mask."""
        return hashlib.blake2b(self._bits, digest_size=16).digest()

    def __call__(self, text: bytes) -> bool:
        token = self._vocabulary.token_of(text)
        if token is not None:
            return bool(self._bits[token >> 3] >> (token & 7) & 1)
        found = self.answers.get(text)
        if found is None:
            found = self.answers[text] = self._may_take(self._vocabulary.bytewise(text))
        return found

    def answered(self) -> list[tuple[list[int] | None, bool]]:
        """Return the answers so far, to compare with `agrees` at other places."""
        return [(self._vocabulary.bytewise(text), was) for text, was in self.answers.items()]

    def agrees(self, answers: list[tuple[list[int] | None, bool]]) -> bool:
        """Return whether the answers are the same here."""
        return all(self._may_take(path) == was for path, was in answers)

    def _may_take(self, path: list[int] | None) -> bool:
        return path is None or self._matcher.validate_tokens(path) == len(path)


class LLGuidanceMatcher(Matcher):
    """Matcher on llguidance; see `contracts.matcher.Matcher`.

    It handles end-of-sequence tokens itself. llguidance accepts these tokens at some complete texts
    only, and an error would end llguidance's matcher.
    """

    def __init__(self, grammar: LLGuidanceGrammar) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._parser = Parser(grammar.lexer, grammar.vocabulary.size)
        self._tokens = self._parser.tokens  # accepted, without the end of the sequence
        self._ended = 0  # accepted end-of-sequence tokens: 0 or 1
        self._error = ""
        self._settled = -1
        """Number of tokens at the end of the last forced run. Nothing is forced there, if the
        matcher accepted the run."""
        self._run: list[int] = []

    def allowed_mask(self) -> np.ndarray:
        return bitmask.filled(self.fill_bitmask, self._vocabulary.size)

    def fill_bitmask(self, out: np.ndarray) -> None:
        out = bitmask.writable(out, self._vocabulary.size)
        if not self._ended:
            self._parser.fill_bitmask(out)
            if not self._grammar.special:  # a negation allows their names among the bytes
                np.bitwise_and(out, ~self._vocabulary.special_mask, out=out)
        if self._ended or self._parser.matcher.is_error():
            out[:] = 0  # llguidance allows the end of the sequence after its own failure

    def advance(self, token_id: int) -> bool:
        if self._ended or not 0 <= token_id < self._vocabulary.size:
            return self._refuse(token_id)
        if token_id in self._vocabulary.eos_token_ids:
            if not self.is_accepting():
                return self._refuse(token_id)
            self._ended = 1
        # Other tokens without text are refused here: to llguidance, some are an error for good.
        elif not (self._is_known(token_id) and self._parser.take(token_id)):
            return self._refuse(token_id)
        self._error = ""
        return True

    def _is_known(self, token_id: int) -> bool:
        return bool(self._vocabulary.token_bytes[token_id]) or token_id in self._grammar.special

    def is_accepting(self) -> bool:
        return not self._parser.matcher.is_error() and self._parser.matcher.is_accepting()

    def is_finished(self) -> bool:
        if (self._grammar.empty_only and not self._parser.matcher.is_error()) or self._ended:
            return True
        return self.is_accepting() and self._parser.matcher.is_stopped()

    def forced_text(self) -> bytes:
        return bytes(self._forced_runs()[0])

    def _forced_runs(self) -> list[_Run]:
        if self._ended or self._parser.matcher.is_error() or self._parser.matcher.is_accepting():
            return [b""]
        return _runs(self._parser.matcher.compute_ff_bytes())

    def forced_tokens(self) -> list[int]:
        at = len(self._tokens)
        if self._ended or self._parser.matcher.is_error():
            return []
        if at == self._settled and self._tokens[at - len(self._run) :] == self._run:
            return []
        if at or self._grammar.beginning is None:
            tokens = self._found_forced()
            if not at and not self._parser.matcher.is_error():
                self._grammar.beginning = tuple(tokens)
        else:
            tokens = list(self._grammar.beginning)
        self._settled, self._run = at + len(tokens), tokens.copy()
        return tokens

    def _found_forced(self) -> list[int]:
        runs = self._forced_runs()
        if runs == [b""]:
            return []
        tail = self._grammar.canonicalizer.tail(self._tokens)
        tokens: list[int] = []
        for text, special in zip(runs[:-1:2], runs[1::2], strict=True):
            assert isinstance(text, bytes) and isinstance(special, int)
            if text:
                found = self._grammar.closed(tail, text) if tail is not None else ()
                tokens += found
                if sum(len(self._vocabulary.token_bytes[token]) for token in found) < len(text):
                    return tokens
            tokens.append(special)
            tail = self._grammar.canonicalizer.tail([])
        if tail is not None and runs[-1]:
            tokens += self._last_forced(tail, runs)
        return tokens

    def _last_forced(self, tail: bytes, runs: list[_Run]) -> list[int]:
        """Return the forced tokens of the last text, which may continue. For this purpose the runs
        are accepted and undone."""
        path = _path(runs, self._vocabulary)
        if path is None:
            return []
        taken = self._parser.matcher.try_consume_tokens(path)
        try:
            if taken < len(path):
                return []
            following = _Following(self._parser.matcher, self._grammar)
            if self._parser.matcher.is_error():
                return []
            return self._grammar.forced_after(tail, bytes(runs[-1]), following)
        finally:
            if taken:
                self._parser.matcher.rollback(taken)

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens) + self._ended:
            raise ValueError(f"cannot undo {count} of {len(self._tokens) + self._ended} tokens")
        self._error = ""
        self._settled = -1
        inner = max(count - self._ended, 0)
        if count:
            self._ended = 0
        self._parser.undo(inner)

    def reset(self) -> None:
        self.rollback(len(self._tokens) + self._ended)

    def rollback_refused(self) -> int | None:
        self._error = "the constraint has nothing to check that its mask does not hold"
        return None

    def error(self) -> str:
        if self._parser.matcher.is_error():
            return reason(self._parser.matcher)
        return self._error

    def _refuse(self, token_id: int) -> bool:
        self._error = f"the constraint forbids token {token_id} after {len(self._tokens)} tokens"
        return False


def _runs(forced: bytes) -> list[_Run]:
    """Split forced bytes into texts and special tokens in turns; the last part is a text."""
    found: list[_Run] = []
    for at, run in enumerate(_SPECIAL.split(forced)):
        found.append(int(run) if at % 2 else run)
        if not at % 2 and _MARK in run:  # the beginning of several special tokens
            return [*found[:-1], run[: run.index(_MARK)]]
    return found


def _path(runs: list[_Run], vocabulary: Vocabulary) -> list[int] | None:
    """Return tokens of one byte each for the runs; None where the vocabulary lacks a byte."""
    path: list[int] = []
    for run in runs:
        part = [run] if isinstance(run, int) else vocabulary.bytewise(run)
        if part is None:
            return None
        path += part
    return path


def parser_limits(config: ConstraintConfig) -> LLParserLimits:
    """Return llguidance's bounds, at compilation and at every mask, in proportion to the
    config's."""
    # About 2 kB per lexer state, by llguidance's documentation.
    states = max(1000, min(250_000, config.compile_memory_bytes >> 15))
    return LLParserLimits(
        # An object of n optional properties makes a row of 4 n items, and its masks take time
        # quadratic in that: 0.1 s here.
        max_items_in_row=10_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=states,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def reason(matcher: LLMatcher) -> str:
    """Return llguidance's error message without the state that it may append."""
    message = matcher.get_error().split("\n<")[0].removesuffix("<non-verbose/>").strip()
    return "no text satisfies it" if message.startswith("NoExtension") else message


# Hybrid -------------------------------------------------------------------------------------------
#
# llguidance with memos: masks are stored by the state of an automaton for a schema's declared part
# (`json_schema/writers`). llguidance is asked again only if the automaton has no transition.
#
# All requests at a state share its mask from llguidance. The mask includes tokens that begin in the
# declared part and end elsewhere. After such a token a request continues in llguidance.


log = logging.getLogger(__name__)

_HYBRID_MARK = ord(MARK)


class HybridGrammar(DfaGrammar):
    """Grammar `inner`, with the declared part of its language in `dfa`; see
    `contracts.matcher.Grammar`.

    Every mask that llguidance makes at a state is compared with the automaton's tokens. The mask
    must have all declared tokens, and none that could not begin at a mark. If both disagree,
    requests leave the automaton at their next token.
    """

    backend = "llguidance"

    def __init__(
        self,
        vocabulary: Vocabulary,
        inner: LLGuidanceGrammar,
        dfa: LazyDfa,
        canonicalizer: Canonicalizer,
        max_table_bytes: int,
    ) -> None:
        super().__init__(vocabulary, dfa, canonicalizer, max_table_bytes)
        self.inner = inner
        self._marks = _Marks(dfa)
        self._any = TokenWalk(vocabulary.trie, self._marks)
        self._checking = threading.Lock()

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.inner.nbytes

    def other(self) -> Matcher:
        return self.inner.matcher()

    # ------------------------------------------------------------ answers for matchers

    def row(self, state: int) -> MaskRow | None:
        # At an untrusted state even two requests of one step may need different masks.
        return super().row(state) if self.trusted else None

    def keep(self, state: int, words: np.ndarray, failed: bool) -> None:
        """Take in llguidance's mask of a state, for all requests."""
        row = self.row(state)
        if failed or row is None:
            return
        if not self._agrees(state, words):
            log.warning("a schema's automaton and llguidance do not agree; it is not used")
            self.trusted = False
            self.states.forget()
        if self.trusted:
            self.table.store(row.row, words)

    def _agrees(self, state: int, words: np.ndarray) -> bool:
        try:
            declared = self.table.walked(state)
            with self._checking:
                any_ = bitmask.packed(self._any.allowed(state + 1))
        except TooLarge:
            return True  # not known
        missing = declared & self.vocabulary.without_zeros & ~words
        return not (missing | words & ~(any_ | declared)).any()

    def run(self, state: int, data: bytes) -> int | None:
        """Return the state after `data`; `DEAD` if the text is, or may be, that of a mark."""
        try:
            for byte in data:
                if state == DEAD or self._marks.may_begin(state)[byte]:
                    return DEAD
                state = self.dfa.step(state, byte)
        except TooLarge:
            return None
        return state

    def step(self, state: int, token_id: int) -> int | None:
        row = self.row(state)
        if row is None or not self.table.filled(row.row):
            return None
        allowed = bitmask.allows(self.table.rows[row.row], token_id)
        return self.after(state, token_id) if allowed else DEAD

    def forced_text(self, state: int) -> bytes | None:
        return self.texts.get(state)

    def forced_tokens(self, state: int, tail: bytes) -> list[int] | None:
        return None

    def after(self, state: int, token_id: int) -> int:
        is_text = token_id not in self.vocabulary.eos_token_ids
        if is_text and (not self.trusted or _HYBRID_MARK in self.vocabulary.token_bytes[token_id]):
            return BEYOND
        return super().after(state, token_id)


_NONE = np.zeros(256, bool)


class _Marks:
    """Automaton in which anything may follow the first byte of a mark's text (`masks.Automaton`).
    State s of the automaton is s + 1 here; 0 is behind a mark."""

    def __init__(self, dfa: LazyDfa) -> None:
        self._dfa = dfa
        self._known: dict[int, np.ndarray] = {}

    @property
    def num_states(self) -> int:
        return self._dfa.num_states + 1

    @property
    def byte_classes(self) -> np.ndarray:
        return np.arange(256, dtype=np.uint8)

    def may_begin(self, state: int) -> np.ndarray:
        """Return the bytes with which the text of a mark may begin at a state, bool [256]."""
        known = self._known.get(state)
        if known is None:
            known = _NONE
            marked = self._dfa.step(state, _HYBRID_MARK)
            if marked != DEAD:
                known = _NONE.copy()
                for sign in b"+-":
                    for listed in self._listed(self._dfa.step(marked, sign)):
                        which = np.full(256, sign == ord("-"))
                        which[list(bytes.fromhex(listed))] ^= True
                        known |= which
            self._known[state] = known
        return known

    def _listed(self, state: int) -> Iterator[str]:
        """Yield the hexadecimal digits of each mark whose sign leads to a state."""
        ways = [("", state)] if state != DEAD else []
        while ways:
            text, place = ways.pop()
            if self._dfa.step(place, ord(",")) != DEAD:
                yield text
            for digit in "0123456789abcdef":
                after = self._dfa.step(place, ord(digit))
                ways += [(text + digit, after)] if after != DEAD else []

    def transitions(self, states: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(states), 256), np.int32)
        for row, state in zip(rows, (states - 1).tolist(), strict=True):
            if state >= 0:
                row[:] = self._dfa.transitions(np.array([state]))[0] + 1
                row[row == 0] = DEAD
                row[self.may_begin(state)] = 0
        return rows
