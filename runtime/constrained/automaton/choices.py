"""One of many given texts."""

from __future__ import annotations

from collections.abc import Iterable

from rootlace.runtime.constrained.automaton.syntax import Either, Literal
from rootlace.wire.errors import InvalidConstraint


def either(texts: Iterable[str]) -> Either:
    """Exactly one of `texts`, in ascending order without repetitions.

    `nfa` reads such an `Either` as one trie, of which only visited nodes are made: 65,536 texts
    cost little more than sorting them. Raises InvalidConstraint if a text is not valid Unicode.
    """
    distinct = sorted(set(texts))
    try:
        "".join(distinct).encode()
    except UnicodeEncodeError:
        for text in distinct:
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise InvalidConstraint(f"choices: {text!r} has a surrogate in it") from None
    return Either(tuple(map(Literal, distinct)))
