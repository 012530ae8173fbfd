"""Compiler of constraints: the choice of a backend for a constraint, and a cache of grammars.

    constraint -> KINDS[kind].build -> _regular: the configured backend for regular languages
                                    -> _lark, _schema, _tag: llguidance, checked where necessary

Sections: the cache; the compiler; regular languages; llguidance; the kinds. To add a kind, see
`rootlace.types.constraint_kinds`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, Unpack

import msgspec

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.structured import grammars
from rootlace.runtime.structured.checked_backend import CheckedGrammar, IslandGrammar, Islands
from rootlace.runtime.structured.dfa_backend import AutomatonGrammar, SteppedBuilds
from rootlace.runtime.structured.gbnf import SpecialTokens, names_tokens, with_exact_schemas
from rootlace.runtime.structured.json_schema.json_text import WHITESPACE, gap_of
from rootlace.runtime.structured.json_schema.normal_form import (
    PreparedSchema,
    has_numbers,
    has_open_keys,
    keywords_within,
)
from rootlace.runtime.structured.json_schema.to_llguidance import written
from rootlace.runtime.structured.json_schema.validate import UniqueKeys, Verifier, digits_needed
from rootlace.runtime.structured.json_schema.writers import declared_part, has_own_spelling, lark_of
from rootlace.runtime.structured.llguidance_backend import HybridGrammar, LLGuidanceGrammar
from rootlace.runtime.structured.regex import syntax
from rootlace.runtime.structured.regex.lazy_dfa import LazyDfa
from rootlace.runtime.structured.regex.lookaround import has_look
from rootlace.runtime.structured.regex.parse import parse
from rootlace.runtime.structured.regex.syntax import Either, Literal, Regex, TooLarge, pattern_of
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
    """Cache of the most recently used grammars: at most `max_entries`, and about `max_bytes`.
    Thread-safe. A grammar in use lives on when it leaves the cache."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[Hashable, Grammar] = OrderedDict()
        self._building: dict[Hashable, Future[Grammar]] = {}
        self._lock = threading.RLock()

    def get(self, key: Hashable) -> Grammar | None:
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
            return grammar

    def get_or_build(self, key: Hashable, build: Callable[[], Grammar]) -> Grammar:
        """Return the grammar of `key`, built once for all threads that ask at the same time. An
        exception of `build` is raised in all of these threads; a later call builds again."""
        with self._lock:
            grammar = self.get(key)
            if grammar is not None:
                return grammar
            builds = key not in self._building
            building = self._building.setdefault(key, Future())
        if builds:
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
        """Evict the oldest grammars first. The grammar used last stays, with any size."""
        total = sum(grammar.nbytes for grammar in self._grammars.values())
        while len(self._grammars) > 1 and (
            len(self._grammars) > self._max_entries or total > self._max_bytes
        ):
            _, gone = self._grammars.popitem(last=False)
            total -= gone.nbytes


# Compiler -----------------------------------------------------------------------------------------


DEFAULT = ConstraintConfig()


class GrammarCompiler:
    """Compiler of constraints for one tokenizer, with the most recently used grammars. Thread-safe.
    The time of one compilation has no bound here: see `sandbox.CompileService`."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int | None = None,
        eos_token_ids: list[int] | None = None,
        config: ConstraintConfig = DEFAULT,
        documents: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a compiler. `tokenizer` is a transformers fast tokenizer, a `tokenizers.Tokenizer`
        (then name the `eos_token_ids`) or a `Vocabulary`.

        `vocab_size`: the model's, if the model pads the tokenizer's. `documents`: schemas by URI,
        for `$ref`; nothing is ever fetched.
        """
        if isinstance(tokenizer, Vocabulary):
            self.vocabulary = tokenizer
        else:
            self.vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size, eos_token_ids)
        self.config = config
        self.documents = dict(documents or {})
        """Schemas that `$ref` may name, by URI."""
        self.cache = GrammarCache(config.cache_size, config.cache_bytes)
        self.builds = SteppedBuilds(config.max_device_states, config.max_device_bytes)

    def prepare(self) -> None:
        """Load now (a second) tables that patterns, forced tokens and llguidance need later."""
        syntax.prepare()
        self.canonicalizer.prepare()
        # The vocabulary makes these attributes at first use.
        _ = self.vocabulary.any_mask, self.vocabulary.llguidance

    def compile(
        self,
        constraint: Constraint | None = None,
        *,
        whitespace: str = "flexible",
        strict: bool = False,
        **sources: Unpack[ConstraintKeywords],
    ) -> Grammar:
        """Return the grammar of a `Constraint`, or of exactly one of the `sources`.

        `json_schema` is a schema (dict, bool or JSON text) or a Python type. Raises
        InvalidConstraint with the reason (for a schema, with the place in it) if no text can
        satisfy the constraint.
        """
        constraints = {name: value for name, value in sources.items() if value is not None}
        if unknown := constraints.keys() - KINDS:
            raise TypeError(f"compile() got an unexpected keyword argument {min(unknown)!r}")
        if constraint is None:
            constraint = _constraint_of(constraints, whitespace, strict)
        elif not isinstance(constraint, Constraint):
            raise TypeError(
                f"a Constraint, or one of {', '.join(KINDS)} by its name, "
                f"not {type(constraint).__name__}"
            )
        elif constraints:
            raise TypeError("either a Constraint or one of the named sources")
        key = as_compiled(constraint)
        return self.cache.get_or_build(key, lambda: self.build(key))

    def cached(self, constraint: Constraint) -> Grammar | None:
        """Return the grammar of a constraint if the cache holds it."""
        return self.cache.get(as_compiled(constraint))

    def build(self, constraint: Constraint) -> Grammar:
        """Compile `constraint` without the cache. Raises InvalidConstraint."""
        check_size(constraint, self.config)
        try:
            return KINDS[constraint.kind].build(self, constraint)
        except RecursionError:
            raise InvalidConstraint(f"{constraint.kind}: nested too deeply") from None
        except InvalidConstraint as error:
            if str(error).startswith(f"{constraint.kind}: "):
                raise
            raise InvalidConstraint(f"{constraint.kind}: {error}") from None

    @cached_property
    def canonicalizer(self) -> Canonicalizer:
        """Canonical tokens of forced text; made at first use."""
        return Canonicalizer(self.vocabulary)


def _constraint_of(sources: Mapping[str, Any], whitespace: str, strict: bool) -> Constraint:
    """Return the constraint of the one source that is given. Raises InvalidConstraint."""
    if len(sources) != 1:
        found = ", ".join(sources) or "none"
        raise InvalidConstraint(f"a constraint has exactly one of {', '.join(KINDS)}, not {found}")
    if whitespace not in ("compact", "flexible"):
        raise InvalidConstraint(f'whitespace: must be "compact" or "flexible", not {whitespace!r}')
    ((kind, value),) = sources.items()
    try:
        source = constraint_kinds.KINDS[kind].write(value)  # type: ignore[index]
    except InvalidConstraint as error:
        raise InvalidConstraint(f"{kind}: {str(error).removeprefix(f'{kind} ')}") from None
    return Constraint(kind, source, whitespace, bool(strict))  # type: ignore[arg-type]


def as_compiled(constraint: Constraint) -> Constraint:
    """Return `constraint` without the options that do not change its grammar."""
    if constraint.jump_forward == "canonical" and not constraint.optional:
        return constraint
    return msgspec.structs.replace(constraint, jump_forward="canonical", optional=False)


def check_size(constraint: Constraint, config: ConstraintConfig) -> None:
    """Raise InvalidConstraint if the kind is unknown or the source exceeds its bound."""
    if constraint.kind not in KINDS:
        raise InvalidConstraint(f"kind: must be one of {', '.join(KINDS)}, not {constraint.kind!r}")
    if len(constraint.source) > config.max_source_bytes:
        raise InvalidConstraint(
            f"{constraint.kind}: {len(constraint.source)} characters exceed the bound of "
            f"{config.max_source_bytes} (max_source_bytes)"
        )


# Regular languages --------------------------------------------------------------------------------


MAX_KEPT_PATTERN = 1 << 18
"""Most characters of the pattern that a grammar keeps in case its automaton gets too large."""


def _regular(
    compiler: GrammarCompiler, constraint: Constraint, regex: Regex, none: str = "no text matches"
) -> Grammar:
    """Return a regular language's grammar by the backend; `none`: the error if it is empty.

    "auto" prefers the automaton. Raises InvalidConstraint, or TooLarge where other backends remain.
    """
    vocabulary, config = compiler.vocabulary, compiler.config
    canonicalizer = compiler.canonicalizer
    if config.backend == "outlines_core":
        # Late import: few configurations choose this backend.
        from rootlace.runtime.structured.outlines_backend import OutlinesGrammar

        return OutlinesGrammar(vocabulary, regex, canonicalizer, config)
    if config.backend == "llguidance":
        return _llguidance(compiler, _lark_of(regex))
    try:
        dfa = LazyDfa(regex, config.max_states)
    except TooLarge:
        if config.backend == "automaton" or has_look(regex):  # which llguidance lacks
            raise
        return _llguidance(compiler, _lark_of(regex))
    if dfa.empty:
        raise InvalidConstraint(f"{constraint.kind}: {none}")
    try:
        # One text, not a tree of thousands of objects that each full garbage collection visits.
        kept: Regex | str = pattern_of(regex, MAX_KEPT_PATTERN)
    except InvalidConstraint:
        kept = regex

    def beside() -> Grammar:
        """Build the grammar of llguidance. The compiler is not held: its cache holds the result."""
        lark = _lark_of(kept)
        return LLGuidanceGrammar(vocabulary, lark, canonicalizer, config, frozenset())

    return AutomatonGrammar(
        vocabulary, dfa, canonicalizer, beside, config.max_table_bytes, compiler.builds
    )


def _lark_of(regex: Regex | str) -> str:
    return f"start: /{regex if isinstance(regex, str) else pattern_of(regex)}/"


# llguidance ---------------------------------------------------------------------------------------


def _require_llguidance(compiler: GrammarCompiler, constraint: Constraint) -> None:
    backend = compiler.config.backend
    if backend not in ("auto", "llguidance"):
        raise InvalidConstraint(
            f"{constraint.kind}: it is not regular, or too large, for the backend {backend!r}"
        )


def _lark(compiler: GrammarCompiler, constraint: Constraint, lark: str) -> Grammar:
    """Return the grammar of a Lark text, in which `%json` embeds schemas."""
    masks: list[dict[str, Any]] = []
    take = partial(_schema_in_grammar, compiler, constraint.whitespace, masks)
    lark = with_exact_schemas(lark, take)
    try:
        inner = _user_llguidance(compiler, _with_constants(lark, masks, constraint.whitespace))
        if names_tokens(constraint.source):  # then bytes do not determine the text
            return inner
        return _each_key_once(compiler, inner, lark, masks)
    except InvalidConstraint as error:
        raise grammars.lark_error(error) from None


def _tag(compiler: GrammarCompiler, constraint: Constraint) -> Grammar:
    if weakest(constraint) is None:  # a lenient tag runs on llguidance with any configuration
        _require_llguidance(compiler, constraint)
    vocabulary = compiler.vocabulary
    masks: list[dict[str, Any]] = []

    def schema_at(schema: dict[str, Any] | bool, place: str, lenient: bool) -> dict[str, Any]:
        where = f"{constraint.kind}: {place}"
        mask = _embedded(compiler, schema, where, "free text", lenient)
        masks.append(mask)
        return _with_whitespace(mask, constraint.whitespace)

    special = SpecialTokens(vocabulary.special_tokens, vocabulary.eos_token_ids)
    lark = lark_of_structural_tag(constraint.source, schema_at, special)
    exact = _with_constants(lark, masks, constraint.whitespace)
    return _each_key_once(compiler, _llguidance(compiler, exact, special.free), lark, masks)


def _schema(compiler: GrammarCompiler, constraint: Constraint) -> Grammar:
    prepared = PreparedSchema(parsed_schema(constraint.source), compiler.documents)
    try:
        backend = compiler.config.backend
        regex = None if backend == "llguidance" else prepared.regex(constraint.whitespace)
        if regex is not None:
            try:
                return _regular(compiler, constraint, regex, "#: nothing satisfies the schema")
            except TooLarge:
                if backend != "auto":
                    raise
        _require_llguidance(compiler, constraint)
        return _masked_schema(compiler, constraint, prepared)
    finally:
        prepared.let_go()


def _masked_schema(
    compiler: GrammarCompiler, constraint: Constraint, prepared: PreparedSchema
) -> Grammar:
    """Build llguidance's mask of a schema, and a check of the rest of the schema."""
    whitespace = constraint.whitespace
    if constraint.strict:
        prepared.refuse_residuals("here (strict)")
    mask = prepared.mask_schema
    gap = gap_of(whitespace == "flexible")
    rules = lark_of(mask, gap)
    llguidance = None
    if rules is not None:
        with suppress(InvalidConstraint):  # too large for llguidance as generated rules
            llguidance = _llguidance(compiler, "\n".join([f"start: {rules[0]}", *rules[1]]))
    exact = llguidance is not None
    if llguidance is None:
        lark = f"start: %json {written(_with_whitespace(mask, whitespace))}"
        llguidance = _llguidance(compiler, lark)
    inner: Grammar = llguidance
    if compiler.config.backend == "auto":
        declared = declared_part(mask, gap, exact=exact)
        inner = _with_automaton(compiler, llguidance, declared)
    checks = prepared.verifier_factory
    if checks is None and not _is_followed(mask):
        return inner
    unique, keywords = UniqueKeys(digits_needed(mask)), keywords_within(mask)
    return CheckedGrammar(
        inner,
        checks or partial(Verifier, unique),
        compiler.vocabulary,
        compiler.config.max_retreats,
        # No multiple may have a number's first digits: then some digits are taken back.
        keys_only=checks is None and "multipleOf" not in keywords,
        long_keys="patternProperties" not in keywords,
    )


def _with_automaton(
    compiler: GrammarCompiler, inner: LLGuidanceGrammar, regex: Regex | None
) -> Grammar:
    """Return `inner` with an automaton of the declared part of its schema, `regex`, if there is
    one."""
    if regex is None:
        return inner
    try:
        dfa = LazyDfa(regex, compiler.config.max_states)
    except TooLarge:
        return inner
    if dfa.empty:
        return inner
    canonicalizer, table_bytes = compiler.canonicalizer, compiler.config.max_table_bytes
    return HybridGrammar(compiler.vocabulary, inner, dfa, canonicalizer, table_bytes)


def _with_constants(lark: str, masks: list[dict[str, Any]], whitespace: str) -> str:
    """Put rules in place of a grammar's schemas whose constants `%json` would respell."""
    if not any(map(has_own_spelling, masks)):
        return lark
    prefix = "own"
    while prefix in lark.lower():
        prefix += "x"
    rules: list[str] = []

    def take(_: int, schema: dict[str, Any]) -> dict[str, Any] | str:
        options = schema.get("x-guidance", {})
        chosen = {key: value for key, value in options.items() if key in _OF_WHITESPACE}
        if chosen != _whitespace(whitespace):
            return schema
        found = lark_of(schema, gap_of(whitespace == "flexible"), f"{prefix}{len(rules)}_")
        if found is None:
            return schema
        rules.extend(found[1])
        return found[0]

    return "\n".join([with_exact_schemas(lark, take), *rules])


def _is_followed(mask: dict[str, Any]) -> bool:
    """Return whether llguidance's mask lets a key come twice, or a number go on for ever."""
    return has_open_keys(mask) or has_numbers(mask)


def _each_key_once(
    compiler: GrammarCompiler, inner: LLGuidanceGrammar, lark: str, masks: list[dict[str, Any]]
) -> Grammar:
    """Return `inner`, the grammar `lark`, with checks of its schemas (`masks`). The checks refuse
    keys that come twice and numbers without an end."""
    if not any(map(_is_followed, masks)):
        return inner
    rules = UniqueKeys(digits_needed(masks))
    islands = IslandGrammar(lark, compiler.config, inner.special, rules)
    keywords = set().union(*map(keywords_within, masks))
    return CheckedGrammar(
        inner,
        partial(Islands, islands),
        compiler.vocabulary,
        compiler.config.max_retreats,
        keys_only="multipleOf" not in keywords,
        long_keys="patternProperties" not in keywords,
    )


def _schema_in_grammar(
    compiler: GrammarCompiler,
    whitespace: str,
    masks: list[dict[str, Any]],
    line: int,
    schema: dict[str, Any],
) -> dict[str, Any]:
    """Return a schema's mask in a grammar; its own llguidance options on white space win."""
    place = f"ebnf: line {line}"
    mask = _embedded(compiler, schema, place, "a grammar")
    masks.append(mask)
    stated = schema.get("x-guidance", {})
    if not isinstance(stated, dict):
        raise InvalidConstraint(f"{place}: #/x-guidance: it must be an object")
    options = {**stated, **mask.get("x-guidance", {})}
    if not stated.keys() & _OF_WHITESPACE:
        options |= _whitespace(whitespace)
    return {**mask, "x-guidance": options}


def _embedded(
    compiler: GrammarCompiler,
    schema: dict[str, Any] | bool,
    place: str,
    inside: str,
    lenient: bool = False,
) -> dict[str, Any]:
    """Return the mask of a schema at a place where nothing can be checked."""
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
    """Return a generated grammar; only the first line of an error means anything to users."""
    try:
        return _user_llguidance(compiler, lark, special)
    except InvalidConstraint as error:
        raise InvalidConstraint(str(error).splitlines()[0]) from None


def _user_llguidance(
    compiler: GrammarCompiler, lark: str, special: frozenset[int] = frozenset()
) -> LLGuidanceGrammar:
    canonicalizer = compiler.canonicalizer
    return LLGuidanceGrammar(compiler.vocabulary, lark, canonicalizer, compiler.config, special)


_OF_WHITESPACE = {"whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"}


@lru_cache(maxsize=2)
def _whitespace(whitespace: str) -> dict[str, Any]:
    """Return llguidance's options for white space; its pattern may match once between any two
    tokens."""
    if whitespace == "compact":
        return {"whitespace_flexible": False}
    return {"whitespace_flexible": True, "whitespace_pattern": pattern_of(WHITESPACE)}


def _with_whitespace(schema: dict[str, Any], whitespace: str) -> dict[str, Any]:
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **_whitespace(whitespace)}}


# Kinds --------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Kind of constraint."""

    is_suspicious: Callable[[str], bool]
    """Function that returns whether compiling a source may take long or much memory."""
    build: Callable[[GrammarCompiler, Constraint], Grammar]
    """Function that compiles a constraint of this kind. Raises InvalidConstraint."""


def _regex(compiler: GrammarCompiler, constraint: Constraint) -> Grammar:
    return _regular(compiler, constraint, parse(constraint.source))


def _choices(compiler: GrammarCompiler, constraint: Constraint) -> Grammar:
    texts = map(Literal, parsed_choices(constraint.source))
    return _regular(compiler, constraint, Either(tuple(texts)))


def _ebnf(compiler: GrammarCompiler, constraint: Constraint) -> Grammar:
    grammar = grammars.grammar_of(constraint.source)
    if not isinstance(grammar, str):
        return _regular(compiler, constraint, grammar)
    _require_llguidance(compiler, constraint)
    return _lark(compiler, constraint, grammar)


KINDS: dict[str, Kind] = {
    "regex": Kind(pattern_is_suspicious, _regex),
    "choices": Kind(lambda source: len(source) > MAX_SOURCE, _choices),
    "ebnf": Kind(pattern_is_suspicious, _ebnf),
    "json_schema": Kind(schema_is_suspicious, _schema),
    "structural_tag": Kind(tag_is_suspicious, _tag),
}
