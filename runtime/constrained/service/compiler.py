"""The compiler of constraints, for an engine and for everybody else, with its cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.automaton import char_sets
from rootlace.runtime.constrained.service.build import GrammarBuilder
from rootlace.runtime.constrained.service.cache import GrammarCache
from rootlace.runtime.constrained.sources.source import constraint_of
from rootlace.runtime.constrained.tokens.vocabulary import Vocabulary
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.wire.protocol import Constraint

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
        char_sets.prepare()
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
