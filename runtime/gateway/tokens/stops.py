"""Stop strings: found across token borders; text that may begin one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Watches a growing text for stop strings.

    The match is the one that is complete first (the longest of those that end at the same
    character), so the result does not depend on how the text arrives. `cut` is then how much of
    the whole text is kept: up to the match, or with `keep` (`no_stop_trim`) its end. Text that may
    still become part of a match is held back.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._first_letters = frozenset(stop[0] for stop in self._stops)
        self._keep = keep
        self._tail = ""  # not released yet; nothing before it can be part of a match
        self._released = 0
        self.matched: str | None = None
        self.cut = 0

    def feed(self, text: str) -> str:
        """Add text; returns what is now certain to be kept."""
        if not self._stops or self.matched is not None:
            return self._release(text) if self.matched is None else ""
        if not self._tail and self._first_letters.isdisjoint(text):
            return self._release(text)
        text = self._tail + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        self._tail = ""
        if best is None:
            held = self._possible_start(text)
            self._tail = text[held:]
            return self._release(text[:held])
        end, start, self.matched = best
        kept = text[: end if self._keep else start]
        self.cut = self._released + len(kept)
        return self._release(kept)

    def skip(self, text: str) -> str:
        """Add text in which stop strings do not count."""
        return self.flush() + self._release(text)

    def flush(self) -> str:
        """At the end, the text that was held back."""
        tail, self._tail = self._tail, ""
        return self._release(tail)

    def _release(self, text: str) -> str:
        self._released += len(text)
        return text

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
