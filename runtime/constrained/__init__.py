"""Constrained decoding: what a `Constraint` allows next, as a bitmask over the vocabulary.

`GrammarCompiler` turns a `Constraint` into a `Grammar`, and a `Grammar` makes one `GrammarMatcher`
per request. The grammars run on llguidance.
"""

from rootlace.runtime.constrained.grammar import Grammar, GrammarCompiler, GrammarMatcher

__all__ = ["Grammar", "GrammarCompiler", "GrammarMatcher"]
