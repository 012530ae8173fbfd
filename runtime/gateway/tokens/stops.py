"""Stop strings and patterns: found across token borders; text that may begin one is held back."""

from __future__ import annotations

from collections.abc import Sequence

from rootlace.runtime.gateway.tokens.stop_search import Finder, Found, Search


class StopChecker:
    """Watches a growing text for stop strings and for the patterns of `searches`.

    The match is the one that is complete first (the longest of those that are with the same
    character), so the result does not depend on how the text arrives; a pattern is complete where
    `re.search` finds it in the text so far. `cut` is then how much of the whole text is kept: up to
    the match, or with `keep` (`no_stop_trim`) its end. Text that may still become part of a match
    is held back; with `keep` no pattern holds any.
    """

    def __init__(
        self, stops: Sequence[str], keep: bool = False, searches: Sequence[Search] = ()
    ) -> None:
        self._strings = _Strings(stops) if stops else None
        self._finders = [Finder(search) for search in searches]
        self._keep = keep
        self._held: list[str] = []  # what is not released yet
        self._length = 0
        self._released = 0
        self.matched: str | None = None
        self.cut = 0

    def feed(self, text: str) -> str:
        """Add text; returns what is now certain to be kept."""
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
        kept = self._release(self.cut)
        self._held = []
        return kept

    def skip(self, text: str) -> str:
        """Add text in which stop strings do not count."""
        before = self.flush()
        if self._strings is not None:
            self._strings.skip(text)
        for finder in self._finders:
            finder.skip(text)
        self._length += len(text)
        self._released = self._length
        return before + text

    def flush(self) -> str:
        """At the end, the text that was held back."""
        held, self._held = "".join(self._held), []
        self._released = self._length
        return held

    def _certain(self) -> int:
        """Up to here nothing can become part of a match."""
        ends = [] if self._strings is None else [self._strings.open]
        if not self._keep:
            ends += [finder.open for finder in self._finders]
        return min(ends, default=self._length)

    def _release(self, end: int) -> str:
        """The text up to character `end` that was not released yet."""
        count = end - self._released
        if not count:
            return ""
        held = "".join(self._held)
        self._held = [held[count:]] if count < len(held) else []
        self._released = end
        return held[:count]


class _Strings:
    """Looks for the first of some strings in one text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first_letters = frozenset(stop[0] for stop in self._stops)
        self._tail = ""
        """The last text, as far as it may become part of a match."""
        self._length = 0

    @property
    def open(self) -> int:
        """From here on the text may become part of a match."""
        return self._length - len(self._tail)

    def skip(self, text: str) -> None:
        """Add text that no match begins or ends in."""
        self._tail = ""
        self._length += len(text)

    def feed(self, text: str) -> tuple[Found, str] | None:
        """Add text. Once something was found, there is no more to feed."""
        before = self.open
        self._length += len(text)
        if not self._tail and self._first_letters.isdisjoint(text):
            return None
        text = self._tail + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin, stop = min(found)
            return Found(before + end, before + begin, before + end), stop
        self._tail = text[self._possible_start(text) :]
        return None

    def _possible_start(self, text: str) -> int:
        """Where the longest tail that begins a stop string starts; len(text) if there is none."""
        longest = len(self._stops[0]) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start] not in self._first_letters:
                continue
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
