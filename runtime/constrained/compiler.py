"""From a constraint to a grammar: which machine runs it, and a cache of what was compiled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher

from rootlace.errors import InvalidConstraint
from rootlace.protocol import Constraint
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.cache import GrammarCache
from rootlace.runtime.constrained.interface import Grammar
from rootlace.runtime.constrained.llguidance_grammar import LLGuidanceGrammar
from rootlace.runtime.constrained.source import constraint_of, parsed_choices, parsed_schema
from rootlace.runtime.constrained.vocabulary import Vocabulary

DEFAULT = ConstraintConfig()


class GrammarCompiler:
    """Compiles constraints for one tokenizer and keeps those used latest. Thread-safe.

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
        self._documents = dict(documents or {})
        self._cache = GrammarCache(config.cache_size, config.cache_bytes)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        vocab_size: int,
        eos_token_ids: list[int],
        config: ConstraintConfig = DEFAULT,
    ) -> GrammarCompiler:
        """For the tokenizer of a model folder. Raises InvalidConstraint if it has none."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise InvalidConstraint(f"constraints need {path}, which does not exist")
        text = path.read_text(encoding="utf-8")
        return cls(Vocabulary(text, vocab_size, eos_token_ids), config=config)

    def compile(
        self,
        constraint: Constraint | None = None,
        *,
        json_schema: Any = None,
        regex: str | None = None,
        ebnf: str | None = None,
        choices: Iterable[str] | None = None,
        structural_tag: dict[str, Any] | str | None = None,
        whitespace: str = "compact",
        strict: bool = False,
    ) -> Grammar:
        """The grammar of a `Constraint`, or of exactly one of the named sources.

        `json_schema` is a schema (dict, bool or JSON text) or a Python type. Raises
        InvalidConstraint with the reason (for a schema: the place in it) if it cannot hold.
        """
        if constraint is None:
            constraint = constraint_of(
                json_schema=json_schema,
                regex=regex,
                ebnf=ebnf,
                choices=choices,
                structural_tag=structural_tag,
                whitespace=whitespace,
                strict=strict,
            )
        key = _key(constraint)
        return self._cache.get_or_build(key, lambda: self.build(key))

    def cached(self, constraint: Constraint) -> Grammar | None:
        """The grammar, if it is there already."""
        return self._cache.get(_key(constraint))

    @property
    def documents(self) -> dict[str, Any]:
        """The schemas that `$ref` may name, by URI."""
        return self._documents

    # ------------------------------------------------------------ building

    def build(self, constraint: Constraint) -> Grammar:
        """Compile it, whether it is in the cache or not, and do not keep it."""
        check_size(constraint, self.config)
        return LLGuidanceGrammar(self.vocabulary, _grammar_source(constraint), self.config)


def check_size(constraint: Constraint, config: ConstraintConfig) -> None:
    """Raises InvalidConstraint where the source alone is beyond the bound."""
    if len(constraint.source) > config.max_source_bytes:
        raise InvalidConstraint(
            f"{constraint.kind}: {len(constraint.source)} characters exceed the bound of "
            f"{config.max_source_bytes}"
        )


def _key(constraint: Constraint) -> Constraint:
    """What two constraints that compile to the same have in common."""
    return msgspec.structs.replace(constraint, jump_forward="canonical")


def _grammar_source(constraint: Constraint) -> str:
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.source)
    if constraint.kind == "ebnf":
        return LLMatcher.grammar_from_lark(constraint.source)
    if constraint.kind == "choices":
        # One regular expression: alternatives of the grammar's own are bounded to about 2,000.
        choices = parsed_choices(constraint.source)
        return LLMatcher.grammar_from_regex(
            "|".join("".join(map(_escaped, choice)) for choice in choices)
        )
    if constraint.kind == "structural_tag":
        raise InvalidConstraint("structural_tag: not yet")
    return _schema_grammar(parsed_schema(constraint.source), constraint.whitespace)


def _escaped(character: str) -> str:
    """A character as a regular expression."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):X}}}"


def _schema_grammar(schema: dict[str, Any] | bool, whitespace: str) -> str:
    flexible = whitespace == "flexible"
    options = {
        "whitespace_flexible": flexible,
        "item_separator": ", " if flexible else ",",
        "key_separator": ": " if flexible else ":",
    }
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps({} if schema is True else schema), overrides=options
        )
    except ValueError as error:
        raise InvalidConstraint(f"json_schema: {error}") from None
