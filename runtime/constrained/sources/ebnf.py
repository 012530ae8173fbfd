"""Grammars as users write them: GBNF (`root ::= …`) and llguidance's dialect of Lark (`start: …`).

A GBNF grammar keeps its language exactly (see `grammar_rules`); one that is regular becomes a
regular expression. In Lark, names in capitals are lexemes, and the longest one counts, as there.
"""

from __future__ import annotations

import re

from rootlace.runtime.constrained.automaton.syntax import Reference, Regex
from rootlace.runtime.constrained.sources.gbnf import parse_gbnf
from rootlace.runtime.constrained.sources.grammar_rules import Regular
from rootlace.runtime.constrained.sources.lexemes import lark_of
from rootlace.wire.errors import InvalidConstraint

_GBNF_RULE = re.compile(r"^[^\S\n]*[A-Za-z_][A-Za-z0-9_-]*\s*::=", re.MULTILINE)
_LARK_EXCERPT = re.compile(r"\s*(\d+ \||\^)")
_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\)")


def is_gbnf(text: str) -> bool:
    """Lark has no `::=`."""
    return _GBNF_RULE.search(text) is not None


def grammar_of(text: str) -> Regex | str:
    """The regular expression of a grammar that is regular, otherwise its Lark text.

    Raises InvalidConstraint naming the line; of Lark, only llguidance says what is wrong with it.
    """
    if not is_gbnf(text):
        return text
    grammar = Regular(parse_gbnf(text), "root")
    regex = grammar.of(Reference("root"))
    return lark_of(grammar) if regex is None else regex


def lark_error(error: InvalidConstraint) -> InvalidConstraint:
    """llguidance writes places as `line(column)`, and below it the lines around the place; those
    are left out, because the last of them are not the user's."""
    lines = [line for line in str(error).splitlines() if not _LARK_EXCERPT.match(line)]
    said = _LARK_PLACE.sub(r"line \1, column \2", " ".join(" ".join(lines).split()))
    return InvalidConstraint(f"ebnf: {said}")
