"""Replays of drafts as trees: drafts against brute force, chains against the product's replay."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.draft_trees import (
    POLICIES,
    WIDTHS,
    Branch,
    Chains,
    Drafts,
    Frequencies,
    Options,
    Places,
    Replayed,
    foresight,
    likeliest,
    replay,
)
from rootlace.runtime.cache.suffix_index import GRAMS
from rootlace.runtime.simulation.trace import Texts, replay_texts

PRICES = (0.02, 0.1, 0.3)


def repeating(seed: int) -> Texts:
    """Requests whose outputs are pieces of prompts and outputs before, and tokens of their own."""
    draw = random.Random(seed)
    pool = [[draw.randrange(40) for _ in range(30)] for _ in range(4)]
    texts: Texts = []
    for length in (0, 1, 2, *(draw.randrange(3, 120) for _ in range(8))):
        output: list[int] = []
        while len(output) < length:
            piece = draw.choice(pool)
            at = draw.randrange(len(piece))
            output += [*piece[at : at + draw.randrange(1, 25)], draw.randrange(40)]
        prompt = [token for piece in draw.sample(pool, 2) for token in piece]
        texts.append((np.array(prompt + output[:length], np.int32), len(prompt)))
        pool.append(output[:length] or [1])
    return texts


@pytest.mark.parametrize("price", PRICES)
@pytest.mark.parametrize("seed", range(3))
def test_chains_are_those_of_the_simulation(seed: int, price: float) -> None:
    texts = repeating(seed)
    found, known = replay(texts, price, Chains()), replay_texts(texts, price)
    right = sum(known.right.values())
    assert (found.steps, found.right) == (known.steps, right) and right > 40
    assert found.drafted == right + sum(known.wrong.values())
    plain = known.tokens - sum(len(text) > prompt for text, prompt in texts)
    assert plain / found.seconds == pytest.approx(known.speedup)


def every_kind() -> list[Drafts]:
    return [*map(Chains, POLICIES.values()), *map(Frequencies, WIDTHS)]


@pytest.mark.parametrize("drafts", every_kind())
@pytest.mark.parametrize("at_once", [1, 4])
def test_every_token_is_sampled_or_drafted(drafts: Drafts, at_once: int) -> None:
    texts = repeating(5)
    found = replay(texts, 0.1, drafts, at_once)
    begun = sum(len(text) > prompt for text, prompt in texts)
    sampled = sum(len(text) - prompt for text, prompt in texts) - begun - found.right
    assert found.right > 0 and found.drafted >= found.right
    if at_once == 1:
        assert found.steps == sampled
        assert found.seconds == pytest.approx(found.steps + 0.1 * found.drafted)
    else:  # a step samples one token of each row
        assert found.steps < sampled <= 4 * found.steps


def test_branches_bring_what_a_chain_misses() -> None:
    """Two answers by turns: behind the fork the latest text is never the right one."""
    draw = random.Random(7)
    start, first, second, *prompts = (
        [draw.randrange(1000, 9999) for _ in range(8)] for _ in range(43)
    )
    texts = [
        (np.array(prompt + start + (second if number % 2 else first), np.int32), len(prompt))
        for number, prompt in enumerate(prompts)
    ]

    def found(drafts: Drafts) -> Replayed:
        return replay(texts, 0.001, drafts)

    chains, trees = found(Chains()), found(Chains(POLICIES["worth it"]))
    assert trees.steps < chains.steps - 8
    assert found(Chains(foresight)).steps <= trees.steps
    assert found(Frequencies(2)).steps < found(Frequencies(1)).steps - 4


tokens = st.lists(st.integers(0, 3), max_size=40)


@given(st.lists(tokens, max_size=4), tokens)
def test_places_against_brute_force(texts: list[list[int]], lately: list[int]) -> None:
    places = Places()
    for text in texts:
        number = places.open()
        places.learn(number, text[:20])
        places.learn(number, text[20:])
    known = [
        (rank, text[end:])
        for rank, size in reversed([*enumerate(GRAMS)])
        for text in reversed(texts)
        for end in reversed(range(size, len(text)))
        if lately[-size:] == text[end - size : end]
    ]
    assert [(rank, goes_on) for rank, goes_on in places.after(lately)] == [
        (rank, goes_on[:32]) for rank, goes_on in known
    ]
    best = max((rank for rank, _ in known), default=None)
    counts = Counter(goes_on[0] for rank, goes_on in known if rank == best)
    assert places.followers(lately) == (None if best is None else (best, counts))


def test_as_many_tokens_are_the_likeliest() -> None:
    branches = [Branch(1, 2, 0.3, [7, 8]), Branch(0, 1, 0.2, [9])]
    options = Options([1, 2, 3], [0.6, 0.3, 0.15], branches, 0.5, 0.1, [1, 7, 8, 4])
    assert likeliest(1, options) == {(1,), (1, 2), (1, 7)}
    assert likeliest(2, options) == {(1,), (1, 2), (1, 7), (9,), (1, 2, 3), (1, 7, 8)}
    assert foresight(options) == {(1,), (1, 2), (1, 2, 3), (1, 7), (1, 7, 8)}
