"""The rules of a grammar in llguidance's dialect, as they are made."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

from rootlace.runtime.constrained.sources.literals import lexeme, runs


class Rules:
    """Rules and lexemes, by names that are made up here."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names = 0
        self._tokens: dict[frozenset[int], str] = {}

    def name(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    def define(self, name: str, body: str, how: str = "") -> str:
        self._lines.append(f"{name}{how}: {body}")
        return name

    def add(self, stem: str, body: str, how: str = "") -> str:
        return self.define(self.name(stem), body, how)

    def one_of(self, token_ids: Collection[int]) -> str:
        ids = frozenset(token_ids)
        if ids not in self._tokens:
            self._tokens[ids] = self.name("token")
        return self._tokens[ids]

    def literal(self, literal: str) -> str:
        """Empty for nothing."""
        parts = [self.one_of([r]) if isinstance(r, int) else lexeme(r) for r in runs(literal)]
        return " ".join(filter(None, parts))

    def lines(self) -> list[str]:
        """Of two sets of tokens that may come at one place, llguidance knows the first alone where
        they have a token in common. So all sets are made of some that have none."""
        member: dict[int, list[str]] = {}
        for ids, name in self._tokens.items():
            for id_ in ids:
                member.setdefault(id_, []).append(name)
        apart: dict[tuple[str, ...], list[int]] = {}
        for id_, names in sorted(member.items()):
            apart.setdefault(tuple(names), []).append(id_)
        parts: dict[str, list[str]] = {name: [] for name in self._tokens.values()}
        for owners, members in apart.items():
            for name in owners:
                parts[name].append(_tokens(members))
        tokens = [f"{name}: {' | '.join(each)}" for name, each in parts.items()]
        return [*self._lines, *tokens]


def _tokens(ids: list[int]) -> str:
    """One of these, which ascend."""
    ranges = []
    for _, pairs in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        first, *_, last = members = [id_ for _, id_ in pairs] * 2
        ranges.append(f"{first}-{last}" if len(members) > 2 else f"{first}")
    return f"<[{','.join(ranges)}]>"
