"""The compiler of constraints: which backend runs a constraint, and the cache of compiled grammars.

    constraint -> KINDS[kind].read -> Form -> the first of KINDS[kind].backends that can run it

Sections: the cache; the compiler; the backends; the kinds. To add a kind, see
`rootlace.types.constraint_kinds`. "auto" prefers the automaton: regular languages run on it,
everything else on llguidance.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Unpack

import msgspec

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.structured import grammars
from rootlace.runtime.structured.checked_backend import CheckedGrammar
from rootlace.runtime.structured.dfa_backend import AutomatonGrammar, SteppedBuilds
from rootlace.runtime.structured.gbnf import SpecialTokens, names_tokens, with_exact_schemas
from rootlace.runtime.structured.islands import IslandGrammar, Islands
from rootlace.runtime.structured.json_schema.json_text import WHITESPACE, gap_of
from rootlace.runtime.structured.json_schema.prepare import PreparedSchema
from rootlace.runtime.structured.json_schema.spellings import has_open_keys, keywords_within
from rootlace.runtime.structured.json_schema.to_llguidance import written
from rootlace.runtime.structured.json_schema.to_regex import declared_part
from rootlace.runtime.structured.json_schema.validate import UniqueKeys, Verifier
from rootlace.runtime.structured.llguidance_backend import HybridGrammar, LLGuidanceGrammar
from rootlace.runtime.structured.outlines_backend import OutlinesGrammar
from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.emit import pattern_of
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.lookaround import has_look
from rootlace.runtime.structured.regex.parse import parse
from rootlace.runtime.structured.regex.syntax import Either, Literal, Regex, TooLarge
from rootlace.runtime.structured.source import (
    MAX_SOURCE,
    parsed_choices,
    parsed_schema,
    pattern_is_suspicious,
    schema_is_suspicious,
)
from rootlace.runtime.structured.structural_tag import (
    lark_of_structural_tag,
    least_of,
    tag_is_suspicious,
    weakest,
)
from rootlace.runtime.structured.vocabulary.forced_tokens import Canonicalizer
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.types import constraint_kinds
from rootlace.types.constraint_kinds import ConstraintKeywords
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint

# Cache --------------------------------------------------------------------------------------------
#
# Compiled grammars by constraint, shared by requests with the same constraint.


class GrammarCache:
    """The most recently used grammars: at most `max_entries`, and about `max_bytes`. Thread-safe.

    A grammar that somebody still uses lives on when it leaves the cache.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[Hashable, Grammar] = OrderedDict()
        self._building: dict[Hashable, Future[Grammar]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Grammar | None:
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
            return grammar

    def get_or_build(self, key: Hashable, build: Callable[[], Grammar]) -> Grammar:
        """The grammar of `key`, built once however many threads ask at the same time.

        Raises what `build` raises, in all of these threads; who asks later builds again.
        """
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
                return grammar
            own = key not in self._building
            building = self._building.setdefault(key, Future())
        if own:
            try:
                grammar = build()
                with self._lock:
                    self._grammars[key] = grammar
                    self._evict()
                    del self._building[key]
                building.set_result(grammar)
            except BaseException as error:
                del self._building[key]
                building.set_exception(error)
        return building.result()

    def _evict(self) -> None:
        """Oldest first; the one used last stays whatever its size."""
        total = sum(grammar.nbytes for grammar in self._grammars.values())
        while len(self._grammars) > 1 and (
            len(self._grammars) > self._max_entries or total > self._max_bytes
        ):
            _, gone = self._grammars.popitem(last=False)
            total -= gone.nbytes


# Compiler -----------------------------------------------------------------------------------------


DEFAULT = ConstraintConfig()


class GrammarCompiler:
    """Compiles constraints for one tokenizer and keeps the most recently used. Thread-safe.

    The time of one compilation has no bound here: see `sandbox.CompileService`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        eos_token_ids: list[int] | None = None,
        config: ConstraintConfig = DEFAULT,
        documents: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer` is a transformers fast tokenizer, a `tokenizers.Tokenizer` (then name the
        `eos_token_ids`) or a `Vocabulary`. `vocab_size` is the model's, where the model pads the
        tokenizer's. `documents` are schemas by URI, for `$ref`; nothing is ever fetched.
        """
        if isinstance(tokenizer, Vocabulary):
            self.vocabulary = tokenizer
        else:
            self.vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size, eos_token_ids)
        self.config = config
        self.documents = dict(documents or {})
        """The schemas that `$ref` may name, by URI."""
        self._cache = GrammarCache(config.cache_size, config.cache_bytes)
        self._canonicalizer: Canonicalizer | None = None
        self._making = threading.Lock()
        self.builds = SteppedBuilds(config.max_device_states, config.max_device_bytes)

    def prepare(self) -> None:
        """Load now (a second) what patterns, forced tokens and llguidance need at first use."""
        syntax.prepare()
        self.canonicalizer().prepare()
        # The vocabulary makes these attributes at first use.
        _ = self.vocabulary.any_mask, self.vocabulary.joined, self.vocabulary.llguidance

    def compile(
        self,
        constraint: Constraint | None = None,
        *,
        whitespace: str = "flexible",
        strict: bool = False,
        **sources: Unpack[ConstraintKeywords],
    ) -> Grammar:
        """The grammar of a `Constraint`, or of exactly one of the `sources`.

        `json_schema` is a schema (dict, bool or JSON text) or a Python type. Raises
        InvalidConstraint with the reason (for a schema: the place in it) if it cannot hold.
        """
        given = {name: value for name, value in sources.items() if value is not None}
        if unknown := given.keys() - KINDS:
            raise TypeError(f"compile() got an unexpected keyword argument {min(unknown)!r}")
        if constraint is None:
            constraint = _constraint_of(given, whitespace, strict)
        elif not isinstance(constraint, Constraint):
            raise TypeError(
                f"a Constraint, or one of {', '.join(KINDS)} by its name, "
                f"not {type(constraint).__name__}"
            )
        elif given:
            raise TypeError("either a Constraint or one of the named sources")
        key = as_compiled(constraint)
        return self._cache.get_or_build(key, lambda: self.build(key))

    def cached(self, constraint: Constraint) -> Grammar | None:
        """The grammar, if the cache holds it."""
        return self._cache.get(as_compiled(constraint))

    def build(self, constraint: Constraint) -> Grammar:
        """Compile `constraint` without the cache. Raises InvalidConstraint."""
        check_size(constraint, self.config)
        try:
            return self._build(constraint)
        except RecursionError:
            raise InvalidConstraint(f"{constraint.kind}: nested too deeply") from None
        except InvalidConstraint as error:
            if str(error).startswith(f"{constraint.kind}: "):
                raise
            raise InvalidConstraint(f"{constraint.kind}: {error}") from None

    def _build(self, constraint: Constraint) -> Grammar:
        """Build on the first backend that can hold the constraint."""
        kind = KINDS[constraint.kind]
        form = kind.read(self, constraint)
        reason, too_large = "", None
        try:
            for backend in kind.backends:
                reason = backend.cannot(self, form)
                if not reason:
                    try:
                        return backend.build(self, form)
                    except TooLarge as error:
                        too_large = too_large or error
        finally:
            if form.schema is not None:
                form.schema.let_go()
        raise too_large or InvalidConstraint(reason)

    def canonicalizer(self) -> Canonicalizer:
        with self._making:
            if self._canonicalizer is None:
                self._canonicalizer = Canonicalizer(self.vocabulary)
            return self._canonicalizer


def _constraint_of(given: Mapping[str, Any], whitespace: str, strict: bool) -> Constraint:
    """The constraint of the one source that is given. Raises InvalidConstraint."""
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise InvalidConstraint(f"a constraint has exactly one of {', '.join(KINDS)}, not {found}")
    if whitespace not in ("compact", "flexible"):
        raise InvalidConstraint(f'whitespace: must be "compact" or "flexible", not {whitespace!r}')
    ((kind, value),) = given.items()
    source = constraint_kinds.KINDS[kind].write(value)  # type: ignore[index]
    return Constraint(kind, source, whitespace, bool(strict))  # type: ignore[arg-type]


def as_compiled(constraint: Constraint) -> Constraint:
    """`constraint` without the options that do not change its grammar."""
    if constraint.jump_forward == "canonical" and not constraint.optional:
        return constraint
    return msgspec.structs.replace(constraint, jump_forward="canonical", optional=False)


def check_size(constraint: Constraint, config: ConstraintConfig) -> None:
    """Raises InvalidConstraint where the kind is unknown or the source exceeds its bound."""
    if constraint.kind not in KINDS:
        raise InvalidConstraint(f"kind: must be one of {', '.join(KINDS)}, not {constraint.kind!r}")
    if len(constraint.source) > config.max_source_bytes:
        raise InvalidConstraint(
            f"{constraint.kind}: {len(constraint.source)} characters exceed the bound of "
            f"{config.max_source_bytes} (max_source_bytes)"
        )


# Backends -----------------------------------------------------------------------------------------


MAX_KEPT_PATTERN = 1 << 18
"""Characters of the pattern that a grammar keeps for when its automaton gets too large."""


@dataclass(frozen=True)
class Form:
    """A constraint as its kind reads it; a backend runs one of these parts."""

    constraint: Constraint
    regex: Regex | None = None
    schema: PreparedSchema | None = None
    lark: str = ""


class Backend(NamedTuple):
    """One way to run a constraint."""

    cannot: Callable[[GrammarCompiler, Form], str]
    """Why this backend cannot run the form; empty if it may. `build` may still raise TooLarge."""
    build: Callable[[GrammarCompiler, Form], Grammar]


def _not_regular(compiler: GrammarCompiler, form: Form) -> str:
    backend = compiler.config.backend
    return f"{form.constraint.kind}: it is not regular, or too large, for the backend {backend!r}"


def _regular_on(*names: str) -> Callable[[GrammarCompiler, Form], str]:
    """A check that the form is regular and one of the backends `names` is configured."""

    def cannot(compiler: GrammarCompiler, form: Form) -> str:
        able = form.regex is not None and compiler.config.backend in names
        return "" if able else _not_regular(compiler, form)

    return cannot


def _no_pattern(compiler: GrammarCompiler, form: Form) -> str:
    reason = _regular_on("auto", "llguidance")(compiler, form)
    if not reason and compiler.config.backend == "auto" and has_look(_regex(form)):
        return f"{form.constraint.kind}: look-around has no equivalent in other engines"
    return reason


def _no_llguidance(compiler: GrammarCompiler, form: Form) -> str:
    if form.regex is not None and form.schema is None:
        return _not_regular(compiler, form)  # `_PATTERN` is the way of a regular form
    able = compiler.config.backend in ("auto", "llguidance")
    return "" if able else _not_regular(compiler, form)


def _no_tag(compiler: GrammarCompiler, form: Form) -> str:
    """A lenient tag runs on llguidance whatever backend is configured."""
    return "" if weakest(form.constraint) is not None else _no_llguidance(compiler, form)


def _regex(form: Form) -> Regex:
    assert form.regex is not None
    return form.regex


def _build_outlines(compiler: GrammarCompiler, form: Form) -> Grammar:
    canonicalizer = compiler.canonicalizer()
    return OutlinesGrammar(compiler.vocabulary, _regex(form), canonicalizer, compiler.config)


def _build_automaton(compiler: GrammarCompiler, form: Form) -> Grammar:
    regex = _regex(form)
    dfa = LazyDfa(regex, compiler.config.max_states)
    if dfa.empty:
        what = "no text matches" if form.schema is None else "#: nothing satisfies the schema"
        raise InvalidConstraint(f"{form.constraint.kind}: {what}")
    try:
        # One text, not a tree of thousands of objects that each full garbage collection visits.
        kept: Regex | str = pattern_of(regex, MAX_KEPT_PATTERN)
    except InvalidConstraint:
        kept = regex
    vocabulary, config = compiler.vocabulary, compiler.config
    canonicalizer = compiler.canonicalizer()

    def beside() -> Grammar:
        """Build the grammar of llguidance. The compiler is not held: its cache holds the result."""
        lark = _lark_of(kept)
        return LLGuidanceGrammar(vocabulary, lark, canonicalizer, config, frozenset())

    return AutomatonGrammar(
        vocabulary,
        dfa,
        canonicalizer,
        beside,
        config.max_table_bytes,
        compiler.builds,
    )


def _build_pattern(compiler: GrammarCompiler, form: Form) -> Grammar:
    return _pattern_grammar(compiler, _regex(form))


def _pattern_grammar(compiler: GrammarCompiler, regex: Regex | str) -> Grammar:
    return _llguidance(compiler, _lark_of(regex))


def _lark_of(regex: Regex | str) -> str:
    return f"start: /{regex if isinstance(regex, str) else pattern_of(regex)}/"


def _build_lark(compiler: GrammarCompiler, form: Form) -> Grammar:
    masks: list[dict[str, Any]] = []
    take = partial(_schema_in_grammar, compiler, form.constraint.whitespace, masks)
    lark = with_exact_schemas(form.lark, take)
    try:
        inner = _user_llguidance(compiler, lark)
        if names_tokens(form.constraint.source):  # then bytes do not tell what its text is
            return inner
        return _each_key_once(compiler, inner, lark, masks)
    except InvalidConstraint as error:
        raise grammars.lark_error(error) from None


def _build_tag(compiler: GrammarCompiler, form: Form) -> Grammar:
    constraint, vocabulary = form.constraint, compiler.vocabulary
    masks: list[dict[str, Any]] = []

    def schema_at(schema: dict[str, Any] | bool, place: str, lenient: bool) -> dict[str, Any]:
        where = f"{constraint.kind}: {place}"
        mask = _embedded(compiler, schema, where, "free text", lenient)
        masks.append(mask)
        return _with_whitespace(mask, constraint.whitespace)

    special = SpecialTokens(vocabulary.special_tokens, vocabulary.eos_token_ids)
    lark = lark_of_structural_tag(constraint.source, schema_at, special)
    return _each_key_once(compiler, _llguidance(compiler, lark, special.free), lark, masks)


def _build_schema(compiler: GrammarCompiler, form: Form) -> Grammar:
    prepared, whitespace = form.schema, form.constraint.whitespace
    assert prepared is not None
    if form.constraint.strict:
        prepared.refuse_residuals("here (strict)")
    mask = prepared.mask_schema
    llguidance = _llguidance(
        compiler, f"start: %json {written(_with_whitespace(mask, whitespace))}"
    )
    inner: Grammar = llguidance
    if compiler.config.backend == "auto":
        inner = _with_automaton(compiler, llguidance, mask, whitespace)
    checks = prepared.verifier_factory
    if checks is None and not has_open_keys(mask):
        return inner
    return CheckedGrammar(
        inner,
        checks or (lambda: Verifier(UniqueKeys())),
        compiler.vocabulary,
        compiler.config.max_retreats,
        keys_only=checks is None,
        long_keys="patternProperties" not in keywords_within(mask),
    )


def _with_automaton(
    compiler: GrammarCompiler, inner: LLGuidanceGrammar, schema: dict[str, Any], whitespace: str
) -> Grammar:
    """`inner` with an automaton of the part that its schema declares, if there is one."""
    regex = declared_part(schema, gap_of(whitespace == "flexible"))
    if regex is None:
        return inner
    try:
        dfa = LazyDfa(regex, compiler.config.max_states)
    except TooLarge:
        return inner
    if dfa.empty:
        return inner
    canonicalizer, table_bytes = compiler.canonicalizer(), compiler.config.max_table_bytes
    return HybridGrammar(compiler.vocabulary, inner, dfa, canonicalizer, table_bytes)


def _each_key_once(
    compiler: GrammarCompiler, inner: LLGuidanceGrammar, lark: str, masks: list[dict[str, Any]]
) -> Grammar:
    """`inner`, the grammar `lark`, where no object of its schemas (`masks`) has a key twice."""
    if not any(map(has_open_keys, masks)):
        return inner
    islands = IslandGrammar(lark, compiler.config, inner.special)
    return CheckedGrammar(
        inner,
        lambda: Islands(islands),
        compiler.vocabulary,
        compiler.config.max_retreats,
        keys_only=True,
        long_keys=not any("patternProperties" in keywords_within(mask) for mask in masks),
    )


def _schema_in_grammar(
    compiler: GrammarCompiler,
    whitespace: str,
    masks: list[dict[str, Any]],
    line: int,
    schema: dict[str, Any],
) -> dict[str, Any]:
    """The mask of a schema in a grammar; its own llguidance options about white space win."""
    place = f"ebnf: line {line}"
    mask = _embedded(compiler, schema, place, "a grammar")
    masks.append(mask)
    given = schema.get("x-guidance", {})
    if not isinstance(given, dict):
        raise InvalidConstraint(f"{place}: #/x-guidance: it must be an object")
    options = {**given, **mask.get("x-guidance", {})}
    if not given.keys() & _OF_WHITESPACE:
        options |= _whitespace(whitespace)
    return {**mask, "x-guidance": options}


def _embedded(
    compiler: GrammarCompiler,
    schema: dict[str, Any] | bool,
    place: str,
    inside: str,
    lenient: bool = False,
) -> dict[str, Any]:
    """The mask of a schema at a place where nothing can be checked."""
    try:
        prepared = PreparedSchema(schema, compiler.documents)
        if not lenient:
            prepared.refuse_residuals(f"inside {inside}, where nothing can be checked")
        return prepared.mask_schema
    except (InvalidConstraint, RecursionError) as error:
        if lenient:
            return least_of(schema)
        if isinstance(error, RecursionError):
            raise
        reason = str(error).removeprefix("json_schema: ")
        raise InvalidConstraint(f"{place}: {reason}") from None


def _llguidance(
    compiler: GrammarCompiler, lark: str, special: frozenset[int] = frozenset()
) -> LLGuidanceGrammar:
    """A grammar that we wrote; only the first line of an error means anything to the user."""
    try:
        return _user_llguidance(compiler, lark, special)
    except InvalidConstraint as error:
        raise InvalidConstraint(str(error).splitlines()[0]) from None


def _user_llguidance(
    compiler: GrammarCompiler, lark: str, special: frozenset[int] = frozenset()
) -> LLGuidanceGrammar:
    canonicalizer = compiler.canonicalizer()
    return LLGuidanceGrammar(compiler.vocabulary, lark, canonicalizer, compiler.config, special)


_OF_WHITESPACE = {"whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"}


@lru_cache(maxsize=2)
def _whitespace(whitespace: str) -> dict[str, Any]:
    """llguidance's options; its pattern may match once between any two tokens."""
    if whitespace == "compact":
        return {"whitespace_flexible": False}
    return {"whitespace_flexible": True, "whitespace_pattern": pattern_of(WHITESPACE)}


def _with_whitespace(schema: dict[str, Any], whitespace: str) -> dict[str, Any]:
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **_whitespace(whitespace)}}


# Kinds --------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of constraint."""

    is_suspicious: Callable[[str], bool]
    """Whether compiling a source may take long or much memory."""
    read: Callable[[GrammarCompiler, Constraint], Form]
    """The parts that a backend can run. Raises InvalidConstraint."""
    backends: tuple[Backend, ...]
    """Tried in this order; the reason of the last one is the user's."""


def _read_regex(_: GrammarCompiler, constraint: Constraint) -> Form:
    return Form(constraint, regex=parse(constraint.source))


def _read_choices(_: GrammarCompiler, constraint: Constraint) -> Form:
    return Form(constraint, regex=Either(tuple(map(Literal, parsed_choices(constraint.source)))))


def _read_ebnf(_: GrammarCompiler, constraint: Constraint) -> Form:
    grammar = grammars.grammar_of(constraint.source)
    if isinstance(grammar, str):
        return Form(constraint, lark=grammar)
    return Form(constraint, regex=grammar)


def _read_schema(compiler: GrammarCompiler, constraint: Constraint) -> Form:
    schema = PreparedSchema(parsed_schema(constraint.source), compiler.documents)
    if compiler.config.backend == "llguidance":
        return Form(constraint, schema=schema)
    try:
        return Form(constraint, regex=schema.regex(constraint.whitespace), schema=schema)
    except BaseException:
        schema.let_go()
        raise


def _read_tag(_: GrammarCompiler, constraint: Constraint) -> Form:
    return Form(constraint)


_OUTLINES = Backend(_regular_on("outlines_core"), _build_outlines)
_AUTOMATON = Backend(_regular_on("auto", "automaton"), _build_automaton)
_PATTERN = Backend(_no_pattern, _build_pattern)
_REGULAR = (_OUTLINES, _AUTOMATON, _PATTERN)
_LARK = Backend(_no_llguidance, _build_lark)
_SCHEMA = Backend(_no_llguidance, _build_schema)
_TAG = Backend(_no_tag, _build_tag)

KINDS: dict[str, Kind] = {
    "regex": Kind(pattern_is_suspicious, _read_regex, _REGULAR),
    "choices": Kind(lambda source: len(source) > MAX_SOURCE, _read_choices, _REGULAR),
    "ebnf": Kind(pattern_is_suspicious, _read_ebnf, (*_REGULAR, _LARK)),
    "json_schema": Kind(schema_is_suspicious, _read_schema, (*_REGULAR, _SCHEMA)),
    "structural_tag": Kind(tag_is_suspicious, _read_tag, (_TAG,)),
}
