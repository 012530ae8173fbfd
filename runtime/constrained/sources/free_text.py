"""Free text as llguidance's rules: anything, until one of some literals is complete.

Free text consists of texts with a special token between each two. How much of which literal has
just been written is known behind every special token (`_Place`), and nothing else has to be: a
literal that ends in text is a lazy lexeme, with which llguidance ends the free text as soon as it
can, and one that ends in a special token is complete with this one token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rootlace.runtime.constrained.automaton.limits import TooLarge
from rootlace.runtime.constrained.sources.literals import Run, lexeme, runs
from rootlace.runtime.constrained.sources.rules import Rules

FREE, _SOME = "FREE", "SOME"
LEXEMES = f"{FREE}: /(?s:.)*/", f"{_SOME}: /(?s:.)+/"
MAX_WAYS = 4096
_LAZY = "[lazy]"
_Place = frozenset[tuple[int, int]]
"""Pairs of a literal and of how many of its special tokens were just written, with all the text
that it has before and between them."""
_NOWHERE: _Place = frozenset()


class FreeText:
    """Up to the first of `literals` that is complete; none of them stands in another one.

    `complete[i]` stands for free text that ends with literal i, and `going` for all that comes
    before a text without special tokens. They count once `define` is called.
    """

    def __init__(self, rules: Rules, literals: Sequence[str], free: Collection[int]) -> None:
        """`free` are the special tokens that it may hold; those of the literals are among them.
        Raises TooLarge."""
        self._rules = rules
        self._literals = [runs(literal) for literal in literals]
        self._begins: dict[Run, list[int]] = {}
        for index, literal in enumerate(self._literals):
            for run in literal[1:2]:
                self._begins.setdefault(run, []).append(index)
        ends = {"", *(str(literal[0]) for literal in self._literals if len(literal) > 1)}
        self._ends = sorted(ends)
        self._free = frozenset(free)
        self._names = {_NOWHERE: rules.name("at")}
        self._ways: dict[_Place, list[str]] = {_NOWHERE: []}
        complete: list[list[str]] = [[] for _ in literals]
        self._walk(complete)
        self.going = rules.add("any", " | ".join(self._names.values()))
        for index, literal in enumerate(self._literals):
            complete[index] += self._ending_in_text(index, literal)
        self.complete = [rules.add("met", " | ".join(ways)) for ways in complete]

    def define(self, begins: Sequence[str]) -> None:
        """Free text follows each of `begins`."""
        for place, name in self._names.items():
            before = begins if place == _NOWHERE else ()
            self._rules.define(name, " | ".join([*before, *self._ways[place]]))

    def _walk(self, complete: list[list[str]]) -> None:
        """From place to place."""
        waiting, count = [_NOWHERE], 0
        while waiting:
            place = waiting.pop()
            for text, then, ids in self._steps(place):
                count += 1
                if count > MAX_WAYS:
                    raise TooLarge("special tokens stand in too many triggers")
                way = f"{self._names[place]} {text} {self._rules.one_of(ids)}"
                met = [i for i, done in then if self._literals[i][2 * done :] == [""]]
                if met:
                    complete[met[0]].append(way)
                    continue
                if then not in self._names:
                    self._names[then], self._ways[then] = self._rules.name("at"), []
                    waiting.append(then)
                self._ways[then].append(way)

    def _ending_in_text(self, index: int, literal: list[Run]) -> list[str]:
        last, count = str(literal[-1]), len(literal) // 2
        if not last:
            return []
        if not count:
            return [f"{self.going} {self._rules.add('met', f'{FREE} {lexeme(last)}', _LAZY)}"]
        met = self._rules.add("met", lexeme(last), _LAZY)
        return [f"{name} {met}" for at, name in self._names.items() if (index, count) in at]

    def _steps(self, place: _Place) -> Iterator[tuple[str, _Place, set[int]]]:
        """From here to the next special token: a text, where it leads, with which tokens."""
        rests = [self._literals[i][2 * count :] for i, count in place]
        going = {(str(rest[0]), rest[1]) for rest in rests if len(rest) > 1}
        exact = sorted({text for text, _ in going})
        ways = [(text, lexeme(text), True) for text in exact]
        ways += [(text, self._ending(text, exact), False) for text in self._ends]
        special = {*self._begins, *(run for _, run in going)}
        for text, written, is_all in ways:
            leads: dict[_Place, set[int]] = {_NOWHERE: {*self._free.difference(special)}}
            for id_ in special:
                assert isinstance(id_, int)
                leads.setdefault(self._then(place, text, is_all, id_), set()).add(id_)
            for then, ids in leads.items():
                if ids:
                    yield written, then, ids

    def _then(self, place: _Place, text: str, is_all: bool, id_: int) -> _Place:
        """Behind a text that is `text`, or ends with it, and this token."""
        found = set()
        for index in self._begins.get(id_, ()):
            if text.endswith(str(self._literals[index][0])):
                found.add((index, 1))
        for index, count in place if is_all else ():
            if self._literals[index][2 * count : 2 * count + 2] == [text, id_]:
                found.add((index, count + 1))
        return frozenset(found)

    def _ending(self, text: str, exact: Sequence[str]) -> str:
        """A text that ends with `text`, with no longer one of the literals' beginnings, and is none
        of `exact`."""
        parts = [f"/(?s:.)*{lexeme(text)[1:]}" if text else _SOME if "" in exact else FREE]
        longer = [end for end in self._ends if end != text and end.endswith(text)]
        parts += [f"~/(?s:.)*{lexeme(end)[1:]}" for end in longer]
        parts += [f"~{lexeme(each)}" for each in exact if each and each.endswith(text)]
        return parts[0] if len(parts) == 1 else self._rules.add("TEXT", " & ".join(parts))
