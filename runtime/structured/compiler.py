"""The compiler of constraints, for an engine and for everybody else, with its cache."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from typing import Any

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
from rootlace.runtime.structured.source import constraint_of, parsed_choices, parsed_schema
from rootlace.runtime.structured.structural_tag import lark_of_structural_tag, least_of, weakest
from rootlace.runtime.structured.vocabulary.forced_tokens import Canonicalizer
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint

# Build --------------------------------------------------------------------------------------------
#
# From one constraint to its grammar: which machine runs it.
#
# "auto" takes our automaton for what is regular (patterns, choices, regular grammars, schemas with
# finitely many shapes) and llguidance for the rest, and where the automaton would be too large.


MAX_KEPT_PATTERN = 1 << 18
"""Characters; each grammar keeps so many at most for the time when its automaton gets too large."""


class GrammarBuilder:
    """Builds grammars for one vocabulary; keeps none of them. Thread-safe."""

    def __init__(
        self, vocabulary: Vocabulary, config: ConstraintConfig, documents: Mapping[str, Any]
    ) -> None:
        self._vocabulary = vocabulary
        self._config = config
        self._documents = documents
        self._canonicalizer: Canonicalizer | None = None
        self._making = threading.Lock()
        self._builds = SteppedBuilds(config.max_device_states, config.max_device_bytes)

    def build(self, constraint: Constraint) -> Grammar:
        """Raises InvalidConstraint."""
        check_size(constraint, self._config)
        try:
            return self._build(constraint)
        except RecursionError:
            raise InvalidConstraint(f"{constraint.kind}: nested too deeply") from None
        except InvalidConstraint as error:
            if str(error).startswith(f"{constraint.kind}: "):
                raise
            raise InvalidConstraint(f"{constraint.kind}: {error}") from None

    def _build(self, constraint: Constraint) -> Grammar:
        kind, source = constraint.kind, constraint.source
        if kind == "regex":
            return self._regular(kind, parse(source))
        if kind == "choices":
            return self._regular(kind, Either(tuple(map(Literal, parsed_choices(source)))))
        if kind == "ebnf":
            return self._ebnf(source, constraint.whitespace)
        if kind == "structural_tag":
            return self._structural_tag(constraint)
        return self._schema(constraint)

    # ------------------------------------------------------------ regular

    def _regular(self, kind: str, regex: Regex) -> Grammar:
        """Raises TooLarge where the automaton is, and nothing else holds it."""
        backend = self._config.backend
        if backend == "outlines_core":
            return OutlinesGrammar(self._vocabulary, regex, self.forced_tokenizer(), self._config)
        if backend == "llguidance":
            return self._as_pattern(regex)
        try:
            dfa = LazyDfa(regex, self._config.max_states)
        except TooLarge:
            if backend == "automaton" or has_look(regex):
                raise
            return self._as_pattern(regex)
        if dfa.empty:
            what = "#: nothing satisfies the schema" if kind == "json_schema" else "no text matches"
            raise InvalidConstraint(f"{kind}: {what}")
        return AutomatonGrammar(
            self._vocabulary,
            dfa,
            self.forced_tokenizer(),
            self._later_as_pattern(regex),
            self._config.max_table_bytes,
            self._builds,
        )

    def _as_pattern(self, regex: Regex) -> Grammar:
        return self._llguidance(f"start: /{pattern_of(regex)}/")

    def _later_as_pattern(self, regex: Regex) -> Callable[[], Grammar]:
        """What is kept meanwhile is one text, if it can be, and not a tree of thousands of objects:
        each full collection of garbage would look at them."""
        try:
            pattern = pattern_of(regex, MAX_KEPT_PATTERN)
        except InvalidConstraint:
            return lambda: self._as_pattern(regex)
        return lambda: self._llguidance(f"start: /{pattern}/")

    # ------------------------------------------------------------ the rest

    def _ebnf(self, source: str, whitespace: str) -> Grammar:
        grammar = grammars.grammar_of(source)
        if not isinstance(grammar, str):
            return self._regular("ebnf", grammar)
        self._refuse_if_not_regular("ebnf")
        masks: list[dict[str, Any]] = []
        grammar = with_exact_schemas(grammar, partial(self._schema_in_grammar, whitespace, masks))
        try:
            inner = self._on_llguidance(grammar)
            if names_tokens(source):  # then bytes do not tell what its text is
                return inner
            return self._each_key_once(inner, grammar, masks)
        except InvalidConstraint as error:
            raise grammars.lark_error(error) from None

    def _each_key_once(
        self, inner: LLGuidanceGrammar, lark: str, masks: list[dict[str, Any]]
    ) -> Grammar:
        """`inner`, the grammar `lark`, where no object of its schemas (`masks`) has a key twice."""
        if not any(map(has_open_keys, masks)):
            return inner
        islands = IslandGrammar(lark, self._config, inner.special)
        return CheckedGrammar(
            inner,
            lambda: Islands(islands),
            self._vocabulary,
            self._config.max_retreats,
            keys_only=True,
            long_keys=not any("patternProperties" in keywords_within(mask) for mask in masks),
        )

    def _schema_in_grammar(
        self, whitespace: str, masks: list[dict[str, Any]], line: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        """With the options that the grammar gives to llguidance; where these tell of white space,
        they alone do."""
        mask = self._embedded(schema, f"ebnf: line {line}", "a grammar")
        masks.append(mask)
        given = schema.get("x-guidance", {})
        if not isinstance(given, dict):
            raise InvalidConstraint(f"ebnf: line {line}: #/x-guidance: it must be an object")
        options = {**given, **mask.get("x-guidance", {})}
        if not given.keys() & _OF_WHITESPACE:
            options |= _whitespace(whitespace)
        return {**mask, "x-guidance": options}

    def _embedded(
        self,
        schema: dict[str, Any] | bool,
        place: str,
        inside: str,
        lenient: bool = False,
    ) -> dict[str, Any]:
        """The mask of a schema at a place where nothing can be checked."""
        try:
            prepared = PreparedSchema(schema, self._documents)
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

    def _structural_tag(self, constraint: Constraint) -> Grammar:
        if weakest(constraint) is None:  # nothing of it is lenient
            self._refuse_if_not_regular("structural_tag")
        masks: list[dict[str, Any]] = []

        def schema_at(schema: dict[str, Any] | bool, place: str, lenient: bool) -> dict[str, Any]:
            mask = self._embedded(schema, f"structural_tag: {place}", "free text", lenient)
            masks.append(mask)
            return _with_whitespace(mask, constraint.whitespace)

        vocabulary = self._vocabulary
        special = SpecialTokens(vocabulary.special_tokens, vocabulary.eos_token_ids)
        lark = lark_of_structural_tag(constraint.source, schema_at, special)
        return self._each_key_once(self._llguidance(lark, special.free), lark, masks)

    def _schema(self, constraint: Constraint) -> Grammar:
        prepared = PreparedSchema(parsed_schema(constraint.source), self._documents)
        try:
            return self._prepared(prepared, constraint)
        finally:
            prepared.let_go()

    def _prepared(self, prepared: PreparedSchema, constraint: Constraint) -> Grammar:
        if self._config.backend != "llguidance":
            regex = prepared.regex(constraint.whitespace)
            if regex is not None:
                try:
                    return self._regular("json_schema", regex)
                except TooLarge:
                    if self._config.backend != "auto":
                        raise
        self._refuse_if_not_regular("json_schema")
        if constraint.strict:
            prepared.refuse_residuals("here (strict)")
        schema = _with_whitespace(prepared.mask_schema, constraint.whitespace)
        llguidance = self._llguidance(f"start: %json {written(schema)}")
        inner: Grammar = llguidance
        if self._config.backend == "auto":
            inner = self._with_automaton(llguidance, prepared.mask_schema, constraint.whitespace)
        checks = prepared.verifier_factory
        if checks is None and not has_open_keys(prepared.mask_schema):
            return inner
        return CheckedGrammar(
            inner,
            checks or (lambda: Verifier(UniqueKeys())),
            self._vocabulary,
            self._config.max_retreats,
            keys_only=checks is None,
            long_keys="patternProperties" not in keywords_within(prepared.mask_schema),
        )

    def _with_automaton(
        self, inner: LLGuidanceGrammar, schema: dict[str, Any], whitespace: str
    ) -> Grammar:
        """`inner`, the grammar of a schema, with an automaton of what it declares, if any."""
        regex = declared_part(schema, gap_of(whitespace == "flexible"))
        if regex is None:
            return inner
        try:
            dfa = LazyDfa(regex, self._config.max_states)
        except TooLarge:
            return inner
        if dfa.empty:
            return inner
        return HybridGrammar(
            self._vocabulary, inner, dfa, self.forced_tokenizer(), self._config.max_table_bytes
        )

    def _llguidance(self, lark: str, special: frozenset[int] = frozenset()) -> LLGuidanceGrammar:
        try:
            return self._on_llguidance(lark, special)
        except InvalidConstraint as error:
            # The lines of a grammar that we wrote say nothing.
            raise InvalidConstraint(str(error).splitlines()[0]) from None

    def _on_llguidance(self, lark: str, special: frozenset[int] = frozenset()) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(
            self._vocabulary, lark, self.forced_tokenizer(), self._config, special
        )

    def _refuse_if_not_regular(self, kind: str) -> None:
        if self._config.backend not in ("auto", "llguidance"):
            raise InvalidConstraint(
                f"{kind}: it is not regular, or too large, for the backend {self._config.backend!r}"
            )

    def forced_tokenizer(self) -> Canonicalizer:
        with self._making:
            if self._canonicalizer is None:
                self._canonicalizer = Canonicalizer(self._vocabulary)
            return self._canonicalizer


def check_size(constraint: Constraint, config: ConstraintConfig) -> None:
    """Raises InvalidConstraint where the source alone is beyond the bound."""
    if len(constraint.source) > config.max_source_bytes:
        raise InvalidConstraint(
            f"{constraint.kind}: {len(constraint.source)} characters exceed the bound of "
            f"{config.max_source_bytes} (max_source_bytes)"
        )


_OF_WHITESPACE = {"whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"}


@lru_cache(maxsize=2)
def _whitespace(whitespace: str) -> dict[str, Any]:
    """llguidance's options. What its pattern matches may stand, once, between any two tokens."""
    if whitespace == "compact":
        return {"whitespace_flexible": False}
    return {"whitespace_flexible": True, "whitespace_pattern": pattern_of(WHITESPACE)}


def _with_whitespace(schema: dict[str, Any], whitespace: str) -> dict[str, Any]:
    return {**schema, "x-guidance": {**schema.get("x-guidance", {}), **_whitespace(whitespace)}}


# Cache --------------------------------------------------------------------------------------------
#
# Compiled grammars by what they were compiled from, shared by the requests that ask for them.


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

    Nothing here bounds the time one compilation takes; `service.CompileService` does.
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
        `eos_token_ids`) or a `Vocabulary`. `vocab_size` is the model's, where it pads the
        tokenizer's. `documents` are schemas by URI, for `$ref`; nothing is ever fetched.
        """
        if isinstance(tokenizer, Vocabulary):
            self.vocabulary = tokenizer
        else:
            self.vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size, eos_token_ids)
        self.config = config
        self.documents = dict(documents or {})
        """The schemas that `$ref` may name, by URI."""
        self._builder = GrammarBuilder(self.vocabulary, config, self.documents)
        self._cache = GrammarCache(config.cache_size, config.cache_bytes)

    def prepare(self) -> None:
        """Learn what patterns, forcing tokens, thoughts and llguidance take (a second), so that no
        request waits."""
        syntax.prepare()
        self._builder.forced_tokenizer().prepare()
        # They are made when they are first asked for.
        _ = self.vocabulary.any_mask, self.vocabulary.joined, self.vocabulary.llguidance

    def compile(
        self,
        constraint: Constraint | None = None,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        ebnf: str | None = None,
        choices: Iterable[str] | None = None,
        structural_tag: dict[str, Any] | str | None = None,
        whitespace: str = "flexible",
        strict: bool = False,
    ) -> Grammar:
        """The grammar of a `Constraint`, or of exactly one of the named sources.

        `json_schema` is a schema (dict, bool or JSON text) or a Python type. Raises
        InvalidConstraint with the reason (for a schema: the place in it) if it cannot hold.
        """
        sources = {
            "json_schema": json_schema,
            "regex": regex,
            "ebnf": ebnf,
            "choices": choices,
            "structural_tag": structural_tag,
        }
        if constraint is None:
            constraint = constraint_of(sources, whitespace, strict)
        elif not isinstance(constraint, Constraint):
            raise TypeError(
                f"a Constraint, or one of {', '.join(sources)} by its name, "
                f"not {type(constraint).__name__}"
            )
        elif any(source is not None for source in sources.values()):
            raise TypeError("either a Constraint or one of the named sources")
        key = as_compiled(constraint)
        return self._cache.get_or_build(key, lambda: self.build(key))

    def cached(self, constraint: Constraint) -> Grammar | None:
        """The grammar, if it is there already."""
        return self._cache.get(as_compiled(constraint))

    def build(self, constraint: Constraint) -> Grammar:
        """Compile it, whether it is in the cache or not, and do not keep it."""
        return self._builder.build(constraint)


def as_compiled(constraint: Constraint) -> Constraint:
    """What two constraints that compile to the same have in common."""
    if constraint.jump_forward == "canonical" and not constraint.optional:
        return constraint
    return msgspec.structs.replace(constraint, jump_forward="canonical", optional=False)
