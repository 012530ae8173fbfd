"""Our automata beside interegular's, which shares neither the parser nor the construction."""

import random

import interegular
import numpy as np
import pytest

from benchmarks.given import REGEXES, NamedRegex
from rootlace.runtime.structured.regex.lazy_dfa import DEAD, LazyDfa
from rootlace.runtime.structured.regex.parse import parse

OTHERS = "a0 -.,:/\"'\\@+=\n\té中🙂\u0660"


def sampled(dfa: LazyDfa, rng: random.Random, characters: int) -> str | None:
    """Return a text on a random walk that ends at an accepting state; None without an end."""
    state = dfa.start
    text = bytearray()
    for _ in range(characters):
        if dfa.accepting(state) and rng.random() < 0.15:
            break
        (row,) = dfa.transitions(np.array([state]))
        allowed = np.flatnonzero(row != DEAD)
        if not len(allowed):
            break
        ascii_only = allowed[allowed < 0x80]
        some = ascii_only if len(ascii_only) and rng.random() < 0.9 else allowed
        text.append(int(rng.choice(some)))
        state = int(row[text[-1]])
    return text.decode() if dfa.accepting(state) else None


def mutated(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    new = rng.choice(OTHERS + text) * rng.randint(0, 1)
    return text[:at] + new + text[at + rng.randint(0, 2) :]


@pytest.mark.parametrize("named", REGEXES, ids=lambda named: named.name)
def test_same_language(named: NamedRegex) -> None:
    # Its classes of characters are ASCII's.
    pattern = named.pattern.replace(r"\d", "[0-9]").replace(r"\w", "[a-zA-Z0-9_]")
    pattern = pattern.replace(r"\s", r"[ \t\n\r\f\v]")
    ignoring_case = pattern.startswith("(?i)")
    parsed = interegular.parse_pattern(pattern.removeprefix("(?i)"))
    flags = interegular.REFlags.CASE_INSENSITIVE if ignoring_case else interegular.REFlags(0)
    fsm = parsed.to_fsm(flags=flags)
    # (?a): that letters beyond ASCII have ASCII's as their other case is unknown to it.
    dfa = LazyDfa(parse("(?a)" + pattern), 16384)
    rng = random.Random(7)
    texts = list(named.examples)
    for _ in range(400):
        text = sampled(dfa, rng, 120)
        if text is not None:
            texts.append(text)
    texts += [mutated(rng.choice(texts), rng) for _ in range(600)]
    accepted = 0
    for text in texts:
        ours = dfa.accepting(dfa.run(dfa.start, text.encode()))
        assert fsm.accepts(text) == ours, text
        accepted += ours
    assert accepted > 100
    assert len(texts) - accepted > 5
