"""Stop strings against brute force."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.gateway.tokens.stops import StopChecker

texts = st.text("abc", max_size=30)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


def brute(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """Read letter by letter until some stop string has just been completed."""
    for end in range(1, len(text) + 1):
        ended = [s for s in stops if text[:end].endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


@given(st.lists(texts, max_size=8), stop_lists, st.booleans())
@settings(max_examples=600, deadline=None)
def test_like_brute_force(parts: list[str], stops: list[str], keep: bool) -> None:
    checker = StopChecker(stops, keep)
    kept, matched = brute("".join(parts), stops, keep)
    said = ""
    for part in parts:
        said += checker.feed(part)
        # Never more than what is certain, and nothing that may yet be cut.
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
    checker = StopChecker(["END"])
    assert checker.skip("xEN") == "xEN"
    assert checker.feed("D and EN") == "D and "
    assert checker.feed("D") == "" and checker.matched == "END" and checker.cut == 9
