"""The index finds what brute force finds, and nothing of other owners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rootlace.runtime.cache.suffix_index import GRAMS, LONGEST, SuffixIndex


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from([2, 5, 100, 2**31 - 1]),
    capacity=st.sampled_from([40, 10_000]),
)
def test_what_it_finds_is_there(seed: int, vocabulary: int, capacity: int) -> None:
    dice = np.random.default_rng(seed)
    index = SuffixIndex(capacity)
    texts = []
    for owner in ("a", "b", "a"):
        whole = dice.integers(0, vocabulary, dice.integers(1, 120)).astype(np.int32)
        first = int(dice.integers(0, len(whole) + 1))
        text = index.open(owner, whole[:first])
        for at in range(first, len(whole), 7):
            index.learn(text, whole[at : at + 7])
        texts.append((owner, text, whole))
    assert index.tokens == sum(text.end for text in index._texts.values()) <= capacity
    own = texts[-1][1]
    for owner, _, whole in texts:
        for length in range(1, len(whole)):
            found = index.find(own, whole, length)
            if found is None:
                continue
            text, place, rank = found
            assert text.owner is own.owner and text.number and place < text.end
            size = GRAMS[rank]
            assert np.array_equal(text.ids[place - size : place], whole[length - size : length])
        if owner == "a" and vocabulary == 2**31 - 1 and capacity == 10_000:
            # No gram comes twice: each but the last is found, hardly ever by a shorter one, as of
            # two grams in one entry of the table the later one stays.
            shorter = 0
            for length in range(2, len(whole)):
                found = index.find(own, whole, length)
                assert found is not None and int(found[0].ids[found[1]]) == whole[length]
                shorter += GRAMS[found[2]] < max(size for size in GRAMS if size <= length)
            assert shorter <= len(whole) // 10 + 3


def test_a_prompt_is_kept_once() -> None:
    prompt = np.arange(1000, dtype=np.int32)
    index = SuffixIndex(10_000)
    assert index.open("a", prompt).end == 1000
    again = index.open("a", np.concatenate((prompt, ids([5000, 5001]))))
    assert 2 <= again.end <= 2 + 64 + LONGEST
    assert index.open("b", prompt).end == 1000  # another owner's is not known
    edited = prompt.copy()
    edited[500] = 7777
    assert 500 <= index.open("a", edited).end <= 500 + 64 + LONGEST


def test_the_least_recently_used_text_goes_first() -> None:
    index = SuffixIndex(250)
    one, two = (index.open("a", np.arange(at, at + 100, dtype=np.int32)) for at in (0, 1000))
    assert index.find(two, np.arange(50, dtype=np.int32), 50) == (one, 50, len(GRAMS) - 1)
    index.open("a", np.arange(2000, 2100, dtype=np.int32))
    assert one.number and not two.number and two.end == 0
    assert index.find(one, np.arange(1000, 1050, dtype=np.int32), 50) is None
    index.learn(two, ids([1, 2, 3]))  # one that is gone learns nothing
    assert index.tokens == 200


def test_no_request_takes_all_of_the_index_and_no_owner_too_many_texts() -> None:
    index = SuffixIndex(1024)
    one = index.open("a", np.arange(100, dtype=np.int32))
    large = index.open("b", np.arange(5000, dtype=np.int32))
    assert one.number and (large.known, large.end) == (5000, 512)
    for at in range(100):
        index.open("c", ids([at, 1, 2]))
    assert len(index._texts) == 1024 // 64 and index.owners == ["c"]
    assert index.num_bytes < 8 * 4096 + 8 * 1024 + 1000 * 16


def test_the_table_grows_with_what_is_known() -> None:
    index = SuffixIndex(1 << 18)
    first = index.open("a", np.arange(1000, dtype=np.int32))
    assert index.num_bytes < 1 << 20
    texts = [(0, first)]
    for begin in range(1000, 61_000, 20_000):
        texts.append((begin, index.open("a", np.arange(begin, begin + 20_000, dtype=np.int32))))
        for at, text in texts:  # what was learned by a smaller table is found
            tokens = np.arange(at, at + 500, dtype=np.int32)
            known = [index.find(text, tokens, length) for length in range(LONGEST, 500)]
            assert sum(found is not None for found in known) > 0.95 * len(known)
            assert all(found is None or found[0] is text for found in known)
    assert 1 << 23 <= index.num_bytes < 9 << 20
    index.clear()
    assert index.num_bytes < 1 << 20


def test_texts_are_numbered_anew_before_numbers_run_out() -> None:
    index = SuffixIndex(1000)
    index._numbers = 2**32 - 2
    last = index.open("a", np.arange(50, dtype=np.int32))
    assert index.find(last, np.arange(20, dtype=np.int32), 20) == (last, 20, len(GRAMS) - 1)
    text = index.open("a", np.arange(50, dtype=np.int32))
    assert (last.number, text.number, index.tokens) == (0, 1, 50)


def test_without_the_key_nobody_tells_which_grams_share_an_entry() -> None:
    """Of pairs that would push another owner's gram out, next to none do so with another key."""

    def pushes_out(key: bytes, token: int) -> bool:
        index = SuffixIndex(128, key)
        victim = index.open("v", ids([1, 2, 3]))
        assert index.find(victim, ids([1, 2]), 2) == (victim, 2, 0)
        index.open("attacker", ids([token, 7, 8]))
        return index.find(victim, ids([1, 2]), 2) is None

    colliding = [token for token in range(3000) if pushes_out(b"known", token)]
    assert len(colliding) > 2
    assert not any(pushes_out(b"secret", token) for token in colliding)


@pytest.mark.parametrize("forget", ["forget", "clear"])
def test_what_is_forgotten_is_not_found(forget: str) -> None:
    index = SuffixIndex(1000)
    text = index.open("a", np.arange(100, dtype=np.int32))
    other = index.open("b", np.arange(100, dtype=np.int32))
    if forget == "clear":
        index.clear()
    else:
        index.forget("a")
    assert not text.number and bool(other.number) == (forget == "forget")
    fresh = index.open("a", ids([1]))
    assert index.find(fresh, np.arange(50, dtype=np.int32), 50) is None
