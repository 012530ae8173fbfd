"""Stop strings and patterns against brute force."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.server.stops import Search, StopChecker

texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


PATTERNS = {pattern: Search(pattern) for pattern in ("ab|bc", "b+c", "a.*cc", r"(?<=c)a", r"c\Ba")}
patterns = st.lists(st.sampled_from(list(PATTERNS)), max_size=2)


def brute(text: str, stops: list[str], patterns: list[str], keep: bool) -> tuple[str, str | None]:
    """Read letter by letter until a stop string or pattern is complete."""
    for end in range(1, len(text) + 1):
        ended = [(end - len(s), s) for s in stops if text[:end].endswith(s)]
        found = [(re.search(pattern, text[:end]), pattern) for pattern in patterns]
        ended += [(match.start(), pattern) for match, pattern in found if match]
        if ended:
            begin, first = min(ended, key=lambda one: one[0])
            return text[: end if keep else begin], first
    return text, None


@given(st.lists(texts, max_size=8), stop_lists, patterns, st.booleans())
@settings(max_examples=600, deadline=None)
def test_like_brute_force(
    parts: list[str], stops: list[str], patterns: list[str], keep: bool
) -> None:
    stops.sort(key=len, reverse=True)
    checker = StopChecker(stops, keep, [PATTERNS[pattern] for pattern in patterns])
    kept, matched = brute("".join(parts), stops, patterns, keep)
    said = ""
    for part in parts:
        said += checker.feed(part)
        # Only certain text is released, and no text that may still be cut.
        assert kept.startswith(said)
    said += checker.flush()
    assert (said, checker.matched) == (kept, matched)
    if matched is not None:
        assert checker.cut == len(kept)


@given(texts, stop_lists)
@settings(deadline=None)
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    said = checker.feed(text)
    if checker.matched is None:
        held = text[len(said) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


def test_skipped_text_does_not_match() -> None:
    for checker in (StopChecker(["END"]), StopChecker([], searches=[Search("E[N]D|^D")])):
        assert checker.skip("xEN") == "xEN"
        assert checker.feed("D and EN") == "D and "
        assert checker.feed("D") == "" and checker.matched and checker.cut == 9
