"""Constrained decoding: what a `Constraint` allows next, as a mask over the vocabulary.

`GrammarCompiler` turns a constraint into a `Grammar`, and a `Grammar` makes one `Matcher` per
request. It needs no server:

    grammar = GrammarCompiler(tokenizer).compile(regex=r"[0-9]{3}")
    matcher = grammar.matcher()
    matcher.allowed_mask(), matcher.advance(token_id), matcher.is_accepting()
"""

from rootlace.runtime.contracts.matcher import Grammar, Matcher
from rootlace.runtime.structured.compiler import GrammarCompiler

__all__ = ["Grammar", "GrammarCompiler", "Matcher"]
