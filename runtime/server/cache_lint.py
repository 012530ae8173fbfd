"""Detector of prompts that would share a long prefix but for an early difference."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from rootlace.runtime.contracts.messages import TreePage
from rootlace.runtime.server.tokenizer import Tokenizer
from rootlace.wire.protocol import CacheReport

# Finding ------------------------------------------------------------------------------------------
#
# Findings about prompts: the place of a difference, and its cost.


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
    """Group of prompts that would share a long prefix but for an early difference.

    The prompts agree up to `position`, behind the text `before`; there they have `ours` or
    `theirs`. Behind, they share about `tokens` tokens that were computed again, `tokens_lost` over
    `times` prompts.
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
        """Count another prompt with the same finding."""
        self.times += 1
        self.tokens_lost += other.tokens
        self.tokens = other.tokens
        self.ours, self.theirs, self.position = other.ours, other.theirs, other.position
        self.says = describe(self)


def kind_of(ours: str, theirs: str) -> Kind:
    """Classify the difference of two prompts by its texts."""
    mine, others = _WHOLE_WORDS.findall(ours), _WHOLE_WORDS.findall(theirs)
    if mine != others and sorted(mine) == sorted(others):
        return "order"  # the keys of an object, say
    for kind, pattern in _PATTERNS:
        if re.search(pattern, ours) and re.search(pattern, theirs):
            return kind
    return "text"


def describe(finding: Finding) -> str:
    """Return the finding in words, with advice."""
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


# Fingerprints -------------------------------------------------------------------------------------
#
# Fingerprints of a token sequence: hashes of some of its windows, chosen by their content.
#
# Two sequences that share a passage share the fingerprints in it, wherever it stands in either: of
# `RUN` windows that follow each other, the one with the least hash is chosen (Schleimer, Wilkerson,
# Aiken: "Winnowing: local algorithms for document fingerprinting", 2003). So no passage of
# `RUN + WINDOW - 1` tokens is without one, also where it repeats itself.


WINDOW = 16
"""Tokens in a window: the shortest passage that is noticed."""
EVERY = 8
"""Windows per fingerprint, on average."""
RUN = 2 * EVERY - 1

_BASE = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_INVERSE = pow(_BASE, -1, 2**64)


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.empty(count, np.uint64)
    value = 1
    for at in range(count):
        powers[at] = value
        value = value * base & _MASK
    return powers


class Fingerprints:
    """Computes fingerprints of sequences of up to `longest` tokens, from two tables of powers."""

    def __init__(self, longest: int) -> None:
        self._powers = _powers(_BASE, longest)
        self._inverse = _powers(_INVERSE, longest)

    def of(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return hashes (uint64) and positions (int64, ascending) of the chosen windows. The hash
        of a window that occurred before in `tokens` is mixed with how often it occurred.

        `tokens` (int32) is cut to the longest length. A window's hash depends on its tokens alone:
        a polynomial in 64 bits, whose high bits are mixed into the low ones.
        """
        tokens = tokens[: len(self._powers)]
        if len(tokens) < WINDOW + RUN - 1:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[: len(tokens)]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
        hashes = _mixed((sums[WINDOW:] - sums[:-WINDOW]) * self._inverse[: len(sums) - WINDOW])
        edge = np.zeros(RUN - 1, np.uint64)
        least = np.concatenate((edge, _over_runs(np.minimum, hashes), edge))
        # A window is chosen if it is the least of any run that contains it.
        chosen = np.flatnonzero(_over_runs(np.maximum, least) == hashes)
        times, gaps = _repeats(hashes[chosen], chosen)
        # Where the same window begins again every token or two, only some count.
        mask = times % np.maximum(EVERY // gaps, 1) == 0
        chosen, times = chosen[mask], times[mask].astype(np.uint64)
        again = _mixed(hashes[chosen] + times * np.uint64(_BASE))
        return np.where(times > 0, again, hashes[chosen]), chosen


def _over_runs(
    of: Callable[[np.ndarray, np.ndarray], np.ndarray], values: np.ndarray
) -> np.ndarray:
    """Apply `of` (minimum or maximum) to every `RUN` consecutive values."""
    for step in (1, 2, 4):
        values = of(values[:-step], values[step:])
    return of(values[: -(RUN - 8)], values[RUN - 8 :])


def _mixed(hashes: np.ndarray) -> np.ndarray:
    hashes = (hashes ^ (hashes >> np.uint64(29))) * np.uint64(_BASE)
    return hashes ^ (hashes >> np.uint64(32))


def _repeats(hashes: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count each hash's earlier occurrences, and measure the distance to the last (int64)."""
    order = np.argsort(hashes, kind="stable")
    first = np.ones(len(order), bool)
    first[1:] = hashes[order][1:] != hashes[order][:-1]
    count = np.arange(len(order))
    times, gaps = np.empty_like(count), np.empty_like(count)
    times[order] = count - np.maximum.accumulate(np.where(first, count, 0))
    gaps[order] = np.where(first, EVERY, np.diff(positions[order], prepend=0))
    return times, gaps


# Cache texts --------------------------------------------------------------------------------------
#
# Reports of the engine, which hold token ids, with texts added.


SHOWN = 12
"""Tokens shown as text on either side of the end of a match."""


def with_texts(
    report: CacheReport, prompt: np.ndarray, tokenizer: Tokenizer, advice: str = ""
) -> CacheReport:
    """Return the report on `prompt` (int32) with the texts around the end of the match. A character
    whose tokens were cut apart shows as U+FFFD."""
    at = report.matched
    if report.reason in ("whole", "scored", "disabled"):
        return report

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    return msgspec.structs.replace(
        report,
        before=text(prompt[max(at - SHOWN, 0) : at].tolist()),
        goes_on=text(prompt[at : at + SHOWN].tolist()),
        cached_instead=text(list(report.instead[:SHOWN])),
        advice=advice,
    )


def page_with_texts(page: TreePage, tokenizer: Tokenizer) -> TreePage:
    """Return the page with the texts at its nodes' ends."""
    nodes = tuple(
        msgspec.structs.replace(
            node,
            head_text=tokenizer.decode(node.head, skip_special_tokens=False),
            tail_text=tokenizer.decode(node.tail, skip_special_tokens=False),
        )
        for node in page.nodes
    )
    return msgspec.structs.replace(page, nodes=nodes)


# Prompt lint --------------------------------------------------------------------------------------


LONGEST = 16384
"""Most tokens of a prompt that are compared."""
LEAST = 64
"""Fewest recomputed tokens that are reported."""
_KEPT = 64
_FINDINGS = 64
_DIFFERENCE = 64
"""Most tokens of a difference at one place."""
_PER_SECOND = 10.0
_BEFORE = 8

_Owner = tuple[str, str]
"""Namespace and adapter: prompts with both alike may share KV."""


class _Prompt(msgspec.Struct, frozen=True):
    tokens: np.ndarray
    prints: list[int]


class PromptLint:
    """Comparison of each prompt with the last `_KEPT` ones of its namespace and adapter.

    The caller passes prompts of which at least `LEAST` tokens were computed. Costs about 0.5 ms for
    a prompt of 4,096 tokens, at most `_PER_SECOND` times a second.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`decode` turns token ids into text."""
        self._decode = decode
        self._clock = clock
        self._fingerprints: Fingerprints | None = None
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._where: dict[tuple[_Owner, int], tuple[int, int]] = {}
        """(last prompt, position) by owner and fingerprint."""
        self._order: deque[tuple[int, _Owner]] = deque()
        self._serial = 0
        self._allowance = _PER_SECOND
        self._spent_at = clock()
        self._findings: OrderedDict[tuple[str, str, str, int], Finding] = OrderedDict()
        """By namespace, kind, the text before, and a fingerprint of the shared part behind."""

    def findings(self, namespace: str | None = None) -> list[Finding]:
        """Return the findings of one namespace or of all, the costliest first."""
        found = [
            finding
            for finding in self._findings.values()
            if namespace is None or finding.namespace == namespace
        ]
        return sorted(found, key=lambda finding: -finding.tokens_lost)

    def observe(
        self, namespace: str, tokens: np.ndarray, cached: int, adapter: str = ""
    ) -> Finding | None:
        """Compare a prompt (int32), of which `cached` tokens were cached; return any finding."""
        if not self._may():
            return None
        if self._fingerprints is None:
            self._fingerprints = Fingerprints(LONGEST)
        tokens = tokens[:LONGEST]
        prints, positions = self._fingerprints.of(tokens)
        known = prints.tolist()
        owner = namespace, adapter
        finding = self._compare(owner, tokens, cached, known, positions.tolist())
        self._keep(owner, tokens, known, positions.tolist())
        return None if finding is None else self._note(*finding)

    def _compare(
        self, owner: _Owner, tokens: np.ndarray, cached: int, prints: list[int], at: list[int]
    ) -> tuple[Finding, int] | None:
        """Find the earlier prompt that shares most behind the difference. Returns the finding, and
        a fingerprint that other prompts with the difference share, too."""
        shared = [
            (position, *where, print_)
            for print_, position in zip(prints, at, strict=True)
            if position >= cached and (where := self._where.get((owner, print_))) is not None
        ]
        if not shared:
            return None
        ((serial, _),) = Counter(one[1] for one in shared).most_common(1)
        if serial not in self._prompts:
            return None
        other = self._prompts[serial].tokens
        shorter = min(len(tokens), len(other))
        same = tokens[:shorter] == other[:shorter]
        position = int(same.argmin()) if not same.all() else shorter
        behind = [
            (ours, theirs, print_)
            for ours, number, theirs, print_ in shared
            if number == serial and min(ours, theirs) >= position
        ]
        pairs = [(ours, theirs) for ours, theirs, _ in behind]
        length = _length(pairs)
        if length < LEAST:
            return None
        ours, theirs = _resumes(tokens, other, pairs[0], position)
        ordered = all(a[1] < b[1] for a, b in itertools.pairwise(pairs))
        position = self._word(tokens, position)
        difference = self._text(tokens[position:ours]), self._text(other[position:theirs])
        if ordered and max(ours, theirs) - position <= _DIFFERENCE:
            kind = kind_of(*difference)
        elif not ordered:
            kind = "order"
        else:
            return None  # two texts that quote the same passage
        if ordered:  # windows chosen at a passage's very beginning depend on the text before
            inside = ours + WINDOW
            mark = next((one for at_, _, one in behind if at_ >= inside), behind[0][2])
        else:
            mark = min(one for _, _, one in behind)
        finding = Finding(
            kind,
            owner[0],
            position,
            self._text(tokens[max(position - _BEFORE, 0) : position]),
            difference[0][:200],
            difference[1][:200],
            min(length, len(tokens) - cached),
        )
        return finding, mark

    def _note(self, finding: Finding, mark: int) -> Finding:
        key = (finding.namespace, finding.kind, finding.before, mark)
        known = self._findings.get(key)
        if known is None:
            finding.tokens_lost = finding.tokens
            finding.says = describe(finding)
            known = self._findings[key] = finding
            if len(self._findings) > _FINDINGS:
                self._findings.popitem(last=False)
        else:
            known.again(finding)
            self._findings.move_to_end(key)
        return known

    def _keep(self, owner: _Owner, tokens: np.ndarray, prints: list[int], at: list[int]) -> None:
        self._serial += 1
        self._prompts[self._serial] = _Prompt(tokens, prints)
        self._order.append((self._serial, owner))
        for print_, position in zip(prints, at, strict=True):
            self._where[owner, print_] = (self._serial, position)
        if len(self._order) > _KEPT:
            serial, owner = self._order.popleft()
            for print_ in self._prompts.pop(serial).prints:
                where = self._where.get((owner, print_))
                if where is not None and where[0] == serial:
                    del self._where[owner, print_]

    def _may(self) -> bool:
        """Return whether one more prompt may be compared: a bucket that fills by the second."""
        now = self._clock()
        self._allowance = min(self._allowance + (now - self._spent_at) * _PER_SECOND, _PER_SECOND)
        self._spent_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    def _word(self, tokens: np.ndarray, position: int) -> int:
        """Return the beginning of the word that holds the token at `position`, if that is near."""
        for at in range(position, max(position - _BEFORE, 0), -1):
            here, before = self._text(tokens[at : at + 1]), self._text(tokens[at - 1 : at])
            if here[:1].isspace() or before[-1:].isspace():
                return at
        return position

    def _text(self, tokens: np.ndarray) -> str:
        return self._decode(tokens[: 2 * _DIFFERENCE].tolist())


def _length(pairs: list[tuple[int, int]]) -> int:
    """Estimate the tokens shared by two prompts with equal windows at `pairs`, in order."""
    length = WINDOW if pairs else 0
    for (ours, theirs), (next_ours, next_theirs) in itertools.pairwise(pairs):
        step = next_ours - ours
        # Chosen windows of one passage are never far apart.
        near = step == next_theirs - theirs and step <= WINDOW + RUN
        length += step if near else WINDOW
    return length


def _resumes(
    ours: np.ndarray, theirs: np.ndarray, pair: tuple[int, int], position: int
) -> tuple[int, int]:
    """Return where the passage around a pair of equal windows begins in each prompt."""
    a, b = pair
    back = min(a, b) - position
    if back:
        same = ours[a - back : a] == theirs[b - back : b]
        run = back if same.all() else int(same[::-1].argmin())
        a, b = a - run, b - run
    return a, b
