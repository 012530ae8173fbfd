"""Notices prompts that would share a long prefix but for an early difference."""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rootlace.runtime.gateway.lint.finding import Finding, describe, kind_of
from rootlace.runtime.gateway.lint.fingerprints import RUN, WINDOW, Fingerprints

LONGEST = 16384
"""Tokens of a prompt that are looked at."""
LEAST = 64
"""Fewer tokens computed again are not worth a word."""
_KEPT = 64
_FINDINGS = 64
_DIFFERENCE = 64
"""Tokens of a difference that counts as one place."""
_PER_SECOND = 10.0
_BEFORE = 8

_Owner = tuple[str, str]
"""Whose prompts may share KV: a namespace and an adapter."""


@dataclass(frozen=True)
class _Prompt:
    tokens: np.ndarray
    prints: list[int]


class PromptLint:
    """Compares each prompt with the last `_KEPT` ones, those of its namespace and adapter alone.

    Costs about 0.5 ms for a prompt of 4,096 tokens, for prompts of which at least `LEAST` tokens
    were computed, at most `_PER_SECOND` times a second.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`decode` makes text of token ids."""
        self._decode = decode
        self._clock = clock
        self._fingerprints: Fingerprints | None = None
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._where: dict[tuple[_Owner, int], tuple[int, int]] = {}
        """Of an owner and a fingerprint: the last prompt that has it, and where."""
        self._order: deque[tuple[int, _Owner]] = deque()
        self._serial = 0
        self._allowance = _PER_SECOND
        self._spent_at = clock()
        self._findings: OrderedDict[tuple[str, str, str, int], Finding] = OrderedDict()
        """By namespace, kind, what is before, and a fingerprint of what is shared behind."""

    def findings(self, namespace: str | None = None) -> list[Finding]:
        """What was noticed, what cost most first; of one namespace, or of all."""
        found = [
            finding
            for finding in self._findings.values()
            if namespace is None or finding.namespace == namespace
        ]
        return sorted(found, key=lambda finding: -finding.tokens_lost)

    def observe(
        self, namespace: str, tokens: np.ndarray, cached: int, adapter: str = ""
    ) -> Finding | None:
        """A prompt (int32) was computed, but for the first `cached` tokens; what is noticed now."""
        if len(tokens) - cached < LEAST or not self._may():
            return None
        if self._fingerprints is None:
            self._fingerprints = Fingerprints(LONGEST)
        tokens = tokens[:LONGEST]
        prints, positions = self._fingerprints.of(tokens)
        known = prints.tolist()
        owner = namespace, adapter
        found = self._compare(owner, tokens, cached, known, positions.tolist())
        self._keep(owner, tokens, known, positions.tolist())
        return None if found is None else self._note(*found)

    def _compare(
        self, owner: _Owner, tokens: np.ndarray, cached: int, prints: list[int], at: list[int]
    ) -> tuple[Finding, int] | None:
        """Of the prompt before that shares most behind the difference, with a fingerprint that
        other prompts of their kind share, too."""
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
        most = min(len(tokens), len(other))
        same = tokens[:most] == other[:most]
        position = int(same.argmin()) if not same.all() else most
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
        if ordered:  # which windows are chosen at its very beginning depends on what is before
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

    def _note(self, found: Finding, mark: int) -> Finding:
        key = (found.namespace, found.kind, found.before, mark)
        known = self._findings.get(key)
        if known is None:
            found.tokens_lost = found.tokens
            found.says = describe(found)
            known = self._findings[key] = found
            if len(self._findings) > _FINDINGS:
                self._findings.popitem(last=False)
        else:
            known.again(found)
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
        """Whether there is time for one more prompt: a bucket that fills by the second."""
        now = self._clock()
        self._allowance = min(self._allowance + (now - self._spent_at) * _PER_SECOND, _PER_SECOND)
        self._spent_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    def _word(self, tokens: np.ndarray, position: int) -> int:
        """Where the word begins that the token at `position` is in, if that is near."""
        for at in range(position, max(position - _BEFORE, 0), -1):
            here, before = self._text(tokens[at : at + 1]), self._text(tokens[at - 1 : at])
            if here[:1].isspace() or before[-1:].isspace():
                return at
        return position

    def _text(self, tokens: np.ndarray) -> str:
        return self._decode(tokens[: 2 * _DIFFERENCE].tolist())


def _length(pairs: list[tuple[int, int]]) -> int:
    """About how many tokens two prompts share that have equal windows at `pairs`, in order."""
    length = WINDOW if pairs else 0
    for (ours, theirs), (next_ours, next_theirs) in itertools.pairwise(pairs):
        step = next_ours - ours
        # Of windows in one passage the next is never far.
        near = step == next_theirs - theirs and step <= WINDOW + RUN
        length += step if near else WINDOW
    return length


def _resumes(
    ours: np.ndarray, theirs: np.ndarray, pair: tuple[int, int], position: int
) -> tuple[int, int]:
    """Where the passage around a pair of equal windows begins in either."""
    a, b = pair
    back = min(a, b) - position
    if back:
        same = ours[a - back : a] == theirs[b - back : b]
        run = back if same.all() else int(same[::-1].argmin())
        a, b = a - run, b - run
    return a, b
