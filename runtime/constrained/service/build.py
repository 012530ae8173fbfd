"""From one constraint to its grammar: which machine runs it.

"auto" takes our automaton for what is regular (patterns, choices, regular grammars, schemas with
finitely many shapes) and llguidance for the rest, and where the automaton would be too large.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.automaton.dfa import LazyDfa
from rootlace.runtime.constrained.automaton.emit import pattern_of
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.automaton.lookaround import has_look
from rootlace.runtime.constrained.automaton.parse import parse
from rootlace.runtime.constrained.automaton.syntax import Either, Literal, Regex
from rootlace.runtime.constrained.matchers.automaton import AutomatonGrammar
from rootlace.runtime.constrained.matchers.checked import CheckedGrammar
from rootlace.runtime.constrained.matchers.hybrid import HybridGrammar
from rootlace.runtime.constrained.matchers.islands import IslandGrammar, Islands
from rootlace.runtime.constrained.matchers.llguidance import LLGuidanceGrammar
from rootlace.runtime.constrained.matchers.outlines import OutlinesGrammar
from rootlace.runtime.constrained.matchers.stepped import SteppedBuilds
from rootlace.runtime.constrained.schema.guidance import written
from rootlace.runtime.constrained.schema.json_text import WHITESPACE, gap_of
from rootlace.runtime.constrained.schema.key_spelling import has_open_keys, keywords_within
from rootlace.runtime.constrained.schema.prepare import PreparedSchema
from rootlace.runtime.constrained.schema.regular import declared_part
from rootlace.runtime.constrained.schema.verify import UniqueKeys, Verifier
from rootlace.runtime.constrained.sources import ebnf
from rootlace.runtime.constrained.sources.embedded_schemas import names_tokens, with_exact_schemas
from rootlace.runtime.constrained.sources.lenient import least_of, weakest
from rootlace.runtime.constrained.sources.literals import SpecialTokens
from rootlace.runtime.constrained.sources.source import parsed_choices, parsed_schema
from rootlace.runtime.constrained.sources.structural_tag import lark_of_structural_tag
from rootlace.runtime.constrained.tokens.canonical import Canonicalizer
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.wire.errors import InvalidConstraint
from rootlace.wire.protocol import Constraint

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
        grammar = ebnf.grammar_of(source)
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
            raise ebnf.lark_error(error) from None

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
