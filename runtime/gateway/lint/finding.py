"""What was noticed about prompts: where they differ, and what that costs."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

Kind = Literal["time", "id", "number", "text", "order"]

_PATTERNS: tuple[tuple[Kind, str], ...] = (
    (
        "time",
        r"\d{1,2}:\d\d|\d{4}-\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}|(?i:jan|feb|mar|apr|may|jun|jul|"
        r"aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun)[a-z]*\b.*\d|\b1[6-9]\d{8}\b",
    ),
    ("id", r"(?i:[0-9a-f]{4,}-[0-9a-f-]{4,}|(?=[a-z]*\d)(?=\d*[a-z])[0-9a-z]{8,})"),
    ("number", r"\d"),
)
_WHOLE_WORDS = re.compile(r"\b[^\W\d_]+\b")
_WORDS: dict[Kind, str] = {
    "time": "a time or date",
    "id": "an id",
    "number": "a number",
    "text": "a text",
    "order": "parts in another order",
}


class Finding(msgspec.Struct):
    """Prompts that would share a long prefix but for an early difference.

    They are the same up to `position`, whose last text is `before`; there one has `ours` and one
    has `theirs`; behind, they have about `tokens` tokens in common that were computed again,
    in all `tokens_lost` of `times` prompts.
    """

    kind: Kind
    namespace: str
    position: int
    before: str
    ours: str
    theirs: str
    tokens: int
    times: int = 1
    tokens_lost: int = 0
    says: str = ""

    def again(self, other: Finding) -> None:
        """The same was noticed once more."""
        self.times += 1
        self.tokens_lost += other.tokens
        self.tokens = other.tokens
        self.ours, self.theirs, self.position = other.ours, other.theirs, other.position
        self.says = describe(self)


def kind_of(ours: str, theirs: str) -> Kind:
    """What two texts are that stand in the same place of two prompts."""
    mine, others = _WHOLE_WORDS.findall(ours), _WHOLE_WORDS.findall(theirs)
    if mine != others and sorted(mine) == sorted(others):
        return "order"  # the keys of an object, say
    for kind, pattern in _PATTERNS:
        if re.search(pattern, ours) and re.search(pattern, theirs):
            return kind
    return "text"


def describe(finding: Finding) -> str:
    """The finding in words, with what to do."""
    what = _WORDS[finding.kind]
    where = f"at token {finding.position:,}, behind {finding.before!r}"
    if finding.kind == "order":
        return (
            f"{_prompts(finding, 'has', 'have')} {what} from token {finding.position:,} on: with "
            f"the parts that they share first, and always in one order, each would find about "
            f"{finding.tokens:,} tokens more in the cache."
        )
    return (
        f"{_prompts(finding, 'differs', 'differ')} by {what} {where} ({finding.ours!r}, "
        f"{finding.theirs!r}) from others that go on alike: with it behind what is shared, each "
        f"would find about {finding.tokens:,} tokens more in the cache."
    )


def _prompts(finding: Finding, does: str, do: str) -> str:
    return f"1 prompt {does}" if finding.times == 1 else f"{finding.times:,} prompts {do}"
