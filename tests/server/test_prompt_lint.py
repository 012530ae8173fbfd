"""Findings about prompts: fingerprints against sets of windows, findings against prompts with known
differences."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.server.cache_lint import EVERY, WINDOW, Fingerprints, PromptLint, kind_of

PRINTS = Fingerprints(2000)


def array(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def lint(clock: object = None) -> PromptLint:
    """Make a linter of texts with a token for each byte."""
    ticks = iter(range(10**9))
    return PromptLint(lambda ids: bytes(ids).decode(errors="replace"), lambda: float(next(ticks)))


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(count))


RULES, GUIDE = words(60, 1), words(80, 2)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 40_000), max_size=90),
    st.lists(st.integers(0, 40_000), min_size=WINDOW, max_size=120),
    st.lists(st.integers(0, 40_000), max_size=90),
)
def test_fingerprints_depend_on_their_window_alone(
    before: list, passage: list, after: list
) -> None:
    """A passage has the same fingerprints everywhere, at places shifted by the text before."""
    alone = dict(zip(*map(np.ndarray.tolist, PRINTS.of(np.array(passage, np.int32))), strict=True))
    whole = np.array(before + passage + after, np.int32)
    found = dict(zip(*map(np.ndarray.tolist, PRINTS.of(whole)), strict=True))
    windows = [tuple(whole[at : at + WINDOW]) for at in range(len(whole) - WINDOW + 1)]
    for print_, at in alone.items():
        if windows.count(tuple(passage[at : at + WINDOW])) == 1:
            assert found[print_] == at + len(before)


def test_one_window_in_eight_is_a_fingerprint() -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, 2000).astype(np.int32)
    hashes, positions = PRINTS.of(tokens)
    assert 0.8 < len(hashes) * EVERY / 2000 < 1.2 and (np.diff(positions) > 0).all()


@pytest.mark.parametrize("period", [1, 2, 3, 7, 9, 11, 13, 40])
def test_a_passage_that_repeats_itself_has_fingerprints_all_along(period: int) -> None:
    tokens = np.tile(np.random.default_rng(period).integers(0, 50_000, period), 900 // period)
    hashes, positions = PRINTS.of(tokens.astype(np.int32))
    assert len(np.unique(hashes)) == len(hashes)
    assert max(np.diff(positions)) <= 2 * WINDOW and len(hashes) <= len(tokens) / 3
    moved, later = PRINTS.of(np.concatenate((np.arange(50_001, 50_021), tokens)).astype(np.int32))
    common, ours, theirs = np.intersect1d(hashes, moved, return_indices=True)
    assert len(common) > 0.9 * len(hashes)
    assert (later[theirs] - positions[ours] - 20 <= period).all()


def test_a_time_before_what_prompts_share() -> None:
    noticed = lint()
    prompts = [f"System of the day.\nIt is 2026-11-22 10:{at}. {RULES} {GUIDE}" for at in (31, 47)]
    assert noticed.observe("", array(prompts[0]), 0) is None
    position = prompts[0].index("10:31")
    finding = noticed.observe("", array(prompts[1]), position + 3)
    assert finding is not None and (finding.ours, finding.theirs) == ("10:47", "10:31")
    finding = noticed.observe("", array(prompts[0].replace("10:31", "09:15")), position)
    assert finding is not None and finding.kind == "time" and finding.ours == "09:15"
    assert finding.times == 2 and finding.position == position and finding.before.endswith("-22 ")
    rest = len(prompts[0]) - position
    assert 0.5 * rest < finding.tokens < 1.2 * rest
    assert "a time or date" in finding.says and "09:15" in finding.says


@pytest.mark.parametrize(
    "shared",
    [
        "You are a helpful assistant for the company. " * 20,
        "Answer each question in one short sentence, and say so where you do not know. " * 25,
        "-" * 300,
    ],
)
def test_a_time_before_what_repeats_itself(shared: str) -> None:
    noticed = lint()
    for at in range(6):
        text = f"Now is 2026-11-23T15:4{at}:0{at}. {shared}User: {words(12, 40 + at)}"
        finding = noticed.observe("", array(text), 23 if at else 0)
        assert (finding is None) == (at == 0)
    (finding,) = noticed.findings()
    assert finding.kind == "time" and finding.times == 5
    assert abs(finding.tokens - len(shared)) < 50


def test_prompts_that_begin_alike_and_go_on_otherwise_are_two_findings() -> None:
    noticed = lint()
    for at in range(6):
        for rules in (RULES, GUIDE + GUIDE[::-1]):
            noticed.observe("", array(f"<system>Now is 15:4{at}:0{at}. {rules}"), 8)
    second, first = noticed.findings()
    assert first.times == second.times == 5 and first.before == second.before
    assert abs(first.tokens - len(RULES)) < 30
    assert abs(second.tokens - 2 * len(GUIDE)) < 30


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ("10:30", "11:45", "time"),
        ("Monday, 3 May", "Tuesday, 4 May", "time"),
        ("1763851234", "1763851299", "time"),
        ("7f3a-91bc-22", "0001-ffff-3c", "id"),
        ("req8f2k1m0", "req1a2b3c4", "id"),
        ("17", "18", "number"),
        ("Anna", "Bert", "text"),
        ('day": 3, "at": "10:15"', 'at": "10:15", "day": 4', "order"),
        ("a1b", "b1a", "number"),
    ],
)
def test_kinds_of_differences(ours: str, theirs: str, kind: str) -> None:
    assert kind_of(ours, theirs) == kind


def test_parts_in_another_order() -> None:
    noticed = lint()
    assert noticed.observe("", array(f"Use these. {RULES}\n{GUIDE}\n"), 0) is None
    finding = noticed.observe("", array(f"Use these. {GUIDE}\n{RULES}\n"), 11)
    assert finding is not None and finding.kind == "order" and finding.position == 11
    assert "always in one order" in finding.says


def test_what_happens_again_is_one_finding_and_what_cost_most_comes_first() -> None:
    noticed = lint()
    for at in range(100, 112):
        noticed.observe("", array(f"Request no. {at} of today. {RULES}"), 12)
    for name in ("Anna", "Bert", "Carl"):
        noticed.observe("", array(f"Dear {name}, {GUIDE}{GUIDE[::-1]}"), 5)
        noticed.observe("tenant", array(f"Dear {name}, {RULES}"), 5)
    first, second = noticed.findings("")
    assert first.times == 11 and first.kind == "number"
    assert second.times == 2 and second.kind == "text" and second.ours == "Carl"
    assert first.tokens_lost > second.tokens_lost > second.tokens > 0
    assert len(noticed.findings()) == 3 and len(noticed.findings("tenant")) == 1


def test_what_is_no_finding() -> None:
    noticed = lint()
    assert noticed.observe("", array(RULES), 0) is None
    # The same prompt, a continuation, another prompt, their common end.
    for text, cached in [
        (RULES, len(RULES) - 1),
        (f"{RULES} and more: {words(30, 7)}", len(RULES)),
        (words(90, 8), 0),
        (f"{words(90, 9)} Answer in one word, please:", 0),
        (f"{words(90, 10)} Answer in one word, please:", 0),
        ("short", 0),
    ]:
        assert noticed.observe("", array(text), cached) is None, text
    # A text shared with another tenant or another adapter is no finding.
    assert noticed.observe("", array(f"10:30 {RULES}"), 0, "polite") is None
    assert noticed.observe("tenant", array(f"10:30 {RULES}"), 0) is None
    # A passage quoted in two unrelated texts is no finding, either.
    assert noticed.observe("", array(f"{words(40, 11)} {RULES} {words(9, 12)}"), 0) is None
    assert noticed.findings() == []


def test_memory_and_time_are_bounded() -> None:
    now = [0.0]
    noticed = PromptLint(lambda ids: "", lambda: now[0])
    rng = np.random.default_rng(0)
    for _ in range(300):
        now[0] += 0.2
        noticed.observe("", rng.integers(0, 50_000, 400).astype(np.int32), 0)
    assert len(noticed._prompts) == len(noticed._order) == 64
    assert set(noticed._where.values()) <= {
        (serial, at) for serial in noticed._prompts for at in range(400)
    }
    before = noticed._serial
    for _ in range(100):  # in quick succession: only some are examined
        noticed.observe("", rng.integers(0, 50_000, 400).astype(np.int32), 0)
    assert 0 < noticed._serial - before <= 10
