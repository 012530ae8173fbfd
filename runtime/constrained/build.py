"""From one constraint to its grammar: which machine runs it.

"auto" takes our automaton for what is regular (patterns, choices, regular grammars, schemas with
finitely many shapes) and llguidance for the rest, and where the automaton would be too large.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from rootlace.errors import InvalidConstraint
from rootlace.protocol import Constraint
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained import ebnf
from rootlace.runtime.constrained.automaton.dfa import LazyDfa
from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.automaton.parse import parse
from rootlace.runtime.constrained.automaton.syntax import Either, Literal, Regex
from rootlace.runtime.constrained.interface import Grammar
from rootlace.runtime.constrained.lexemes import pattern_of
from rootlace.runtime.constrained.llguidance_grammar import LLGuidanceGrammar
from rootlace.runtime.constrained.source import parsed_choices, parsed_schema
from rootlace.runtime.constrained.structural_tag import Tag, lark_of_tags, parse_structural_tag
from rootlace.runtime.constrained.vocabulary import Vocabulary


class GrammarBuilder:
    """Builds grammars for one vocabulary; keeps none of them. Thread-safe."""

    def __init__(
        self, vocabulary: Vocabulary, config: ConstraintConfig, documents: Mapping[str, Any]
    ) -> None:
        self._vocabulary = vocabulary
        self._config = config
        self._documents = documents

    def build(self, constraint: Constraint) -> Grammar:
        """Raises InvalidConstraint."""
        check_size(constraint, self._config)
        try:
            return self._build(constraint)
        except RecursionError:
            raise InvalidConstraint(f"{constraint.kind}: nested too deeply") from None

    def _build(self, constraint: Constraint) -> Grammar:
        kind, source = constraint.kind, constraint.source
        if kind == "regex":
            return self._regular(kind, parse(source))
        if kind == "choices":
            return self._regular(kind, Either(tuple(map(Literal, parsed_choices(source)))))
        if kind == "ebnf":
            return self._ebnf(source)
        if kind == "structural_tag":
            return self._structural_tag(constraint)
        return self._schema(constraint)

    def _regular(self, kind: str, regex: Regex) -> Grammar:
        try:
            if LazyDfa(regex, self._config.max_states).empty:
                raise InvalidConstraint(f"{kind}: no text matches it")
        except TooLarge:
            pass
        return self._llguidance(kind, LLMatcher.grammar_from_regex(pattern_of(regex)))

    def _ebnf(self, source: str) -> Grammar:
        grammar = ebnf.grammar_of(source)
        if not isinstance(grammar, str):
            return self._regular("ebnf", grammar)
        self._refuse_if_not_regular("ebnf")
        lark = LLMatcher.grammar_from_lark(grammar)
        try:
            return LLGuidanceGrammar(self._vocabulary, lark, self._config)
        except InvalidConstraint as error:
            raise ebnf.lark_error(error) from None

    def _structural_tag(self, constraint: Constraint) -> Grammar:
        self._refuse_if_not_regular("structural_tag")
        tags = parse_structural_tag(constraint.source)

        def schema_of(tag: Tag) -> dict[str, Any]:
            schema = {} if tag.schema is True else tag.schema
            if schema is False:
                raise InvalidConstraint(f"structural_tag: {tag.place}: allows nothing")
            return {**schema, "x-guidance": _json_options(constraint.whitespace)}

        return self._llguidance(
            "structural_tag", LLMatcher.grammar_from_lark(lark_of_tags(tags, schema_of))
        )

    def _schema(self, constraint: Constraint) -> Grammar:
        schema = parsed_schema(constraint.source)
        try:
            source = LLMatcher.grammar_from_json_schema(
                json.dumps({} if schema is True else schema),
                overrides=_json_options(constraint.whitespace),
            )
        except ValueError as error:
            raise InvalidConstraint(f"json_schema: {error}") from None
        return self._llguidance("json_schema", source)

    def _llguidance(self, kind: str, source: str) -> Grammar:
        try:
            return LLGuidanceGrammar(self._vocabulary, source, self._config)
        except InvalidConstraint as error:
            raise InvalidConstraint(f"{kind}: {error}") from None

    def _refuse_if_not_regular(self, kind: str) -> None:
        if self._config.backend not in ("auto", "llguidance"):
            raise InvalidConstraint(
                f"{kind}: it is not regular, which the backend {self._config.backend!r} needs"
            )


def check_size(constraint: Constraint, config: ConstraintConfig) -> None:
    """Raises InvalidConstraint where the source alone is beyond the bound."""
    if len(constraint.source) > config.max_source_bytes:
        raise InvalidConstraint(
            f"{constraint.kind}: {len(constraint.source)} characters exceed the bound of "
            f"{config.max_source_bytes} (max_source_bytes)"
        )


def _json_options(whitespace: str) -> dict[str, Any]:
    flexible = whitespace == "flexible"
    return {
        "whitespace_flexible": flexible,
        "item_separator": ", " if flexible else ",",
        "key_separator": ": " if flexible else ":",
    }
