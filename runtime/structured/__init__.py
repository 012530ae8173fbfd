"""Constrained decoding: what a `Constraint` allows next, as a mask over the vocabulary.

`GrammarCompiler` turns a constraint into a `Grammar`, and a `Grammar` makes one `Matcher` per
request. It needs no server:

    grammar = GrammarCompiler(tokenizer).compile(regex=r"[0-9]{3}")
    matcher = grammar.matcher()
    matcher.allowed_mask(), matcher.advance(token_id), matcher.is_accepting()
"""

from typing import TYPE_CHECKING, Any

from rootlace.runtime.contracts.matcher import Grammar, Matcher

if TYPE_CHECKING:
    from rootlace.runtime.structured.compiler import GrammarCompiler

__all__ = ["Grammar", "GrammarCompiler", "Matcher"]


def __getattr__(name: str) -> Any:
    # Late import: a gateway needs a few modules of this package, and no library for compiling.
    # These libraries take 7 MB and a fifth of a second.
    if name != "GrammarCompiler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rootlace.runtime.structured.compiler import GrammarCompiler

    return GrammarCompiler
