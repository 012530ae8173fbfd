"""Stop strings and patterns: found across token borders; text that may begin one is held back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from rootlace.runtime.server.tool_parsers.base import possible_begin
from rootlace.runtime.structured.regex.nfa import flat, repeats
from rootlace.runtime.structured.regex.parse import AT_LAST_NEWLINE, parse
from rootlace.runtime.structured.regex.syntax import (
    Chars,
    Concat,
    Either,
    Literal,
    Look,
    LookBehind,
    Ranges,
    Regex,
    Repeat,
    TooLarge,
    contains,
    nodes,
    union,
)
from rootlace.wire.errors import InvalidConstraint, InvalidRequest

# Stop search --------------------------------------------------------------------------------------
#
# Search for the first match of a pattern in a growing text.
#
# The match is the first one that `re.search` would find in a growing text: in the shortest
# beginning with a match, the match that begins first. So matches do not depend on the pieces in
# which the text comes. The text's open end counts as an end: `$` and `\b` hold there.
#
# The pattern's positions (Thompson 1968) are followed for all possible starts of a match together,
# the earliest start first. Each position is kept for its first start alone. So Pike's matcher keeps
# the leftmost match (R. Cox, "Regular Expression Matching: the Virtual Machine Approach", 2009). A
# state is the ordered list of kept positions, without their starts. States and steps are remembered
# up to a bound, beyond which all are forgotten. So with any pattern a character costs at most a
# walk over the positions, and memory has a bound.


MAX_POSITIONS = 64
"""Bound on the cost of a character. A position is a character of the pattern or a look-around;
repeated ones count as often as they may occur."""

_MAX_REMEMBERED = 4096
"""Bound on remembered steps plus positions of the states that they lead to."""
_ACCEPT = 0
_NONE = -1


class Found(NamedTuple):
    """Match from `begin` to `end`, known once `seen` characters of the text are there."""

    seen: int
    begin: int
    end: int


class _Reads(msgspec.Struct, frozen=True):
    """Node that reads one character of `ranges`, then goes on at `following`."""

    ranges: Ranges
    following: int


class _Condition(msgspec.Struct, frozen=True):
    """Node that goes on at `following` if the character before (`behind`) or after is in set number
    `number` (`negative`: is not). At the text's ends there is no character."""

    number: int
    behind: bool
    negative: bool
    following: int


_Node = _Reads | _Condition | list[int]
"""A list goes on at any of its nodes."""


class _State:
    """Positions under way, grouped by where they began, first place first. `behind`: bits of the
    pattern's sets that hold the last character. Compared by identity."""

    __slots__ = ("behind", "ended", "groups")

    def __init__(self, groups: tuple[tuple[int, ...], ...], behind: int) -> None:
        self.groups = groups
        self.behind = behind
        self.ended: int | None = None
        """Group with a match if the text ends here, None until computed. `len(groups)` is a match
        that begins here."""


class _Step(NamedTuple):
    """Step of the search. `origins`: for each new group, the old group that it comes from;
    `len(groups)` is a match that begins with the character. `passed`: the group that matched before
    the character, or `_NONE`."""

    state: _State
    origins: tuple[int, ...]
    passed: int


class Search:
    """Pattern to search for, in the syntax of Python's `re`.

    Raises InvalidConstraint for a pattern that `parse` refuses or that matches the empty text. Also
    for look-ahead over more than one character, and more than `MAX_POSITIONS` positions.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        tree = parse(pattern, at_begin=False, at_end=False)
        self._nodes: list[_Node] = [[]]
        self._sets: list[Ranges] = []
        self.positions = 0
        _check_ends(pattern, tree)
        try:
            self._first = self._build(tree, _ACCEPT)
        except RecursionError:
            raise TooLarge("regex: the pattern is nested too deeply") from None
        self._states: dict[tuple[tuple[tuple[int, ...], ...], int], _State] = {}
        self._steps: dict[tuple[_State, str], _Step] = {}
        self._remembered = 0
        if self.ended(self.beginning()) != _NONE:
            raise InvalidConstraint("regex: the pattern matches the empty text")

    def beginning(self, behind: str = "") -> _State:
        """Return the state with nothing under way, behind the character `behind`."""
        return self._state((), self._known(behind))

    def ended(self, state: _State) -> int:
        """Return the group that has a match if the text ends here, or `_NONE`."""
        if state.ended is None:
            seen: set[int] = set()
            found = (
                number
                for number, group in enumerate((*state.groups, (self._first,)))
                if self._open(group, state.behind, 0, seen)[1]
            )
            state.ended = next(found, _NONE)
        return state.ended

    def step(self, state: _State, char: str) -> _Step:
        """Return the step from `state` over `char`."""
        known = self._steps.get((state, char))
        if known is None:
            known = self._made(state, char)
            self._remembered += 1 + sum(map(len, known.state.groups))
            if self._remembered > _MAX_REMEMBERED:
                self._steps.clear()
                self._states.clear()
                self._remembered = 0
            self._steps[state, char] = known
        return known

    def _made(self, state: _State, char: str) -> _Step:
        code, ahead = ord(char), self._known(char)
        opened: set[int] = set()
        taken: set[int] = set()
        groups, origins, passed = [], [], _NONE
        for number, group in enumerate((*state.groups, (self._first,))):
            reading, accepted = self._open(group, state.behind, ahead, opened)
            if accepted and passed == _NONE:
                passed = number
            after = {each.following for each in reading if contains(each.ranges, code)} - taken
            if after:
                taken |= after
                groups.append(tuple(sorted(after)))
                origins.append(number)
        return _Step(self._state(tuple(groups), ahead), tuple(origins), passed)

    def _state(self, groups: tuple[tuple[int, ...], ...], behind: int) -> _State:
        return self._states.setdefault((groups, behind), _State(groups, behind))

    def _known(self, char: str) -> int:
        """Return the sets that hold `char`, as bits; none for "", at an end of the text."""
        if not char:
            return 0
        return sum(1 << n for n, ranges in enumerate(self._sets) if contains(ranges, ord(char)))

    def _open(
        self, group: tuple[int, ...], behind: int, ahead: int, seen: set[int]
    ) -> tuple[list[_Reads], bool]:
        """Return the reading nodes reached from `group` and not yet `seen`, and whether `group` may
        be the match's end."""
        reading, accepted, stack = [], False, [*group]
        while stack:
            number = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            node = self._nodes[number]
            if number == _ACCEPT:
                accepted = True
            elif isinstance(node, _Reads):
                reading.append(node)
            elif isinstance(node, list):
                stack += node
            elif bool((behind if node.behind else ahead) >> node.number & 1) != node.negative:
                stack.append(node.following)
        return reading, accepted

    # ------------------------------------------------------------ building

    def _build(self, regex: Regex, following: int) -> int:
        """Add nodes for `regex`, then `following`; return the node where `regex` begins."""
        match regex:
            case Literal(text):
                for char in reversed(text):
                    following = self._add(_Reads(((ord(char), ord(char)),), following))
                return following
            case Chars(ranges):
                return self._add(_Reads(ranges, following))
            case Concat(parts):
                for part in reversed(parts):
                    following = self._build(part, following)
                return following
            case Either(options):
                return self._append([self._build(option, following) for option in options])
            case Repeat(item, least, most):
                item, least, most = flat(item, least, most)
                return repeats(
                    least, most, following, lambda after: self._build(item, after), self._append
                )
            case LookBehind(chars, negative):
                return self._condition(chars.ranges, True, negative, following)
            case Look(item, negative):
                if regex == AT_LAST_NEWLINE:
                    return self._append([])  # the match came before the newline already
                return self._condition(_one_of(item), False, negative, following)
        raise AssertionError(regex)

    def _condition(self, ranges: Ranges, behind: bool, negative: bool, following: int) -> int:
        if ranges not in self._sets:
            self._sets.append(ranges)
        return self._add(_Condition(self._sets.index(ranges), behind, negative, following))

    def _add(self, node: _Reads | _Condition) -> int:
        self.positions += 1
        if self.positions > MAX_POSITIONS:
            raise TooLarge(f"regex: the pattern has more than {MAX_POSITIONS} positions")
        return self._append(node)

    def _append(self, node: _Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1


class Finder:
    """Search for the first match of `search` in one text."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self._state = search.beginning()
        self._begins: list[int] = []
        """Beginning of each group of the state, in characters."""
        self._length = 0

    @property
    def open(self) -> int:
        """Return the place from which the text may become part of a match."""
        return self._begins[0] if self._begins else self._length

    def skip(self, text: str) -> None:
        """Add text in which no match begins or ends."""
        if text:
            self._state, self._begins = self.search.beginning(text[-1]), []
            self._length += len(text)

    def feed(self, text: str) -> Found | None:
        """Add text; return the match if one is found. After a match there is no more to feed."""
        search, state, begins = self.search, self._state, self._begins
        for at, char in enumerate(text, self._length):
            step = search.step(state, char)
            state, passed = step.state, step.passed
            ended = search.ended(state) if state.ended is None else state.ended
            if passed == ended == _NONE:
                if step.origins:
                    begins = [*begins, at]
                    begins = [begins[number] for number in step.origins]
                elif begins:
                    begins = []
                continue
            begins = [*begins, at]
            after = [*(begins[number] for number in step.origins), at + 1]
            matches = [(begins[passed], at)] if passed != _NONE else []
            matches += [(after[ended], at + 1)] if ended != _NONE else []
            return Found(at + 1, *min(matches))
        self._state, self._begins = state, begins
        self._length += len(text)
        return None


def _one_of(item: Regex) -> Ranges:
    """Return the characters of a look-ahead over one character."""
    options = item.options if isinstance(item, Either) else (item,)
    ranges: list[tuple[int, int]] = []
    for option in options:
        if isinstance(option, Chars):
            ranges += option.ranges
        elif isinstance(option, Literal) and len(option.text) == 1:
            ranges.append((ord(option.text), ord(option.text)))
        else:
            raise InvalidConstraint("regex: look-ahead is supported over one character only")
    return union(ranges)


def _check_ends(pattern: str, tree: Regex) -> None:
    """Refuse `$` where the search cannot decide it: `$` also matches before a last newline. At the
    pattern's end the match came before that newline, unless the pattern looks for the newline.
    Raises InvalidConstraint."""
    if AT_LAST_NEWLINE not in nodes(tree):
        return
    if AT_LAST_NEWLINE in nodes(parse(pattern, at_begin=False)):
        raise InvalidConstraint("regex: `$` is supported at the pattern's end only; \\Z anywhere")
    looks = [node for node in nodes(tree) if isinstance(node, Look) and node != AT_LAST_NEWLINE]
    if any(not look.negative and contains(_one_of(look.item), ord("\n")) for look in looks):
        raise InvalidConstraint("regex: look-ahead at a newline beside `$` is not supported")


# Stop patterns ------------------------------------------------------------------------------------


MAX_LENGTH = 1024


async def searches_of(patterns: Sequence[str]) -> tuple[Search, ...]:
    """Compile stop patterns. Raises InvalidRequest, naming the pattern, for one not supported."""
    if not patterns:
        return ()
    for index, pattern in enumerate(patterns):
        if len(pattern) > MAX_LENGTH:
            raise InvalidRequest(
                f"stop_regex[{index}] has {len(pattern)} characters, at most {MAX_LENGTH} fit",
                f"stop_regex[{index}]",
            )
    # A class such as \w takes milliseconds where it is met first.
    return await asyncio.to_thread(_made, patterns)


def _made(patterns: Sequence[str]) -> tuple[Search, ...]:
    searches = []
    for index, pattern in enumerate(patterns):
        try:
            searches.append(_search(pattern))
        except InvalidConstraint as error:
            reason = str(error).removeprefix("regex: ")
            field = f"stop_regex[{index}]"
            raise InvalidRequest(f"{field}: {reason}", field) from None
        if sum(search.positions for search in searches) > MAX_POSITIONS:
            raise InvalidRequest(
                f"stop_regex: more than {MAX_POSITIONS} positions in all patterns", "stop_regex"
            )
    return tuple(searches)


_search = lru_cache(maxsize=32)(Search)


# Stops --------------------------------------------------------------------------------------------


class StopChecker:
    """Search for stop strings and the patterns of `searches` in a growing text.

    The match that is complete first wins; of matches complete with the same character, the longest.
    So the result does not depend on how the text arrives. A pattern is complete where `re.search`
    finds it in the text so far. `cut` is the length of the kept text: up to the match, or with
    `keep` (`no_stop_trim`) its end. Text that may become part of a match is held back; with `keep`,
    patterns hold back none.
    """

    def __init__(
        self, stops: Sequence[str], keep: bool = False, searches: Sequence[Search] = ()
    ) -> None:
        self._strings = _Strings(stops) if stops else None
        self._finders = [Finder(search) for search in searches]
        self._keep = keep
        self._held: list[str] = []  # text not released yet
        self._length = 0
        self._released = 0
        self.matched: str | None = None
        self.cut = 0

    def feed(self, text: str) -> str:
        """Add text; return the text that is now certain to be kept."""
        if self.matched is not None:
            return ""
        matches: list[tuple[Found, str]] = []
        if self._strings is not None and (match := self._strings.feed(text)) is not None:
            matches.append(match)
        for finder in self._finders:
            if (found := finder.feed(text)) is not None:
                matches.append((found, finder.search.pattern))
        if text:
            self._held.append(text)
            self._length += len(text)
        if not matches:
            return self._release(self._certain())
        found, self.matched = min(matches, key=lambda match: match[0][:2])
        self.cut = found.end if self._keep else found.begin
        text_out = self._release(self.cut)
        self._held = []
        return text_out

    def skip(self, text: str) -> str:
        """Add text in which stop strings do not count; return all text up to its end."""
        before = self.flush()
        if self._strings is not None:
            self._strings.skip(text)
        for finder in self._finders:
            finder.skip(text)
        self._length += len(text)
        self._released = self._length
        return before + text

    def flush(self) -> str:
        """Return the text held back at the end."""
        held, self._held = "".join(self._held), []
        self._released = self._length
        return held

    def _certain(self) -> int:
        """Return the length of text that cannot become part of a match."""
        ends = [] if self._strings is None else [self._strings.open]
        if not self._keep:
            ends += [finder.open for finder in self._finders]
        return min(ends, default=self._length)

    def _release(self, end: int) -> str:
        """Return the text up to character `end` that was not released yet."""
        count = end - self._released
        if not count:
            return ""
        held = "".join(self._held)
        self._held = [held[count:]] if count < len(held) else []
        self._released = end
        return held[:count]


class _Strings:
    """Search for the first of some strings in one text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first_letters = frozenset(stop[0] for stop in self._stops)
        self._tail = ""
        """Last part of the text, as far as it may become part of a match."""
        self._length = 0

    @property
    def open(self) -> int:
        """Return the place from which the text may become part of a match."""
        return self._length - len(self._tail)

    def skip(self, text: str) -> None:
        """Add text in which no match begins or ends."""
        self._tail = ""
        self._length += len(text)

    def feed(self, text: str) -> tuple[Found, str] | None:
        """Add text; return the match if one is found. After a match there is no more to feed."""
        before = self.open
        self._length += len(text)
        if not self._tail and self._first_letters.isdisjoint(text):
            return None
        text = self._tail + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, begin, stop = min(ends)
            return Found(before + end, before + begin, before + end), stop
        self._tail = text[len(text) - possible_begin(text, self._stops) :]
        return None
