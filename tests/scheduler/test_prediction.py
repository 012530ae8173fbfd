"""Places of an output in its prediction."""

import numpy as np
import pytest

from rootlace.runtime.cache.suffix_index import SuffixIndex
from rootlace.runtime.scheduler.drafter import MAX_DRAFT, Drafter, PredictedText, Recalled

TEXT = list(range(100, 160))


def followed(output: list[int], predicted: list[int] = TEXT) -> Drafter:
    prediction = Drafter(PredictedText(np.array(predicted, np.int32)), 3)
    tokens = np.array([1, 2, 3, *output], np.int32)
    for length in range(4, len(tokens) + 1):
        prediction.follow(tokens, length)
    return prediction


@pytest.mark.parametrize(
    ("output", "next_token"),
    [
        ([], 100),
        (TEXT[:10], 110),
        # One token in place of another.
        ([*TEXT[:10], 7], 111),
        ([*TEXT[:10], 7, 111], 112),
        # Two in place of one, and two in place of two: known by one token nearby.
        ([*TEXT[:10], 7, 8, 111], 112),
        ([*TEXT[:10], 7, 8, 112], 113),
        # Put in.
        ([*TEXT[:10], 7, 110], 111),
        ([*TEXT[:10], 7, 8, 9, 110], 111),
        # Left out, a little and much: far away, two tokens say so.
        ([*TEXT[:10], 114], 115),
        ([*TEXT[:10], 130, 131], 132),
        # Moved: what comes again is found before the last right place.
        ([*TEXT[:30], 103, 104], 105),
        # Something else first.
        ([7, 8, 9, 10, 120, 121], 122),
        (TEXT, None),
    ],
)
def test_where_it_goes_on(output: list[int], next_token: int | None) -> None:
    assert followed(output).draft(1) == ([] if next_token is None else [next_token])


def test_something_else_is_not_guessed_for_long() -> None:
    prediction = followed([*TEXT[:10], 7, 8, 9])
    assert prediction.at < 0
    assert not prediction.draft(5) and prediction.worth(0.0) == (0, 0.0)


def test_of_several_places_the_next_one_and_the_longest() -> None:
    repeated = [1, 2, 3, 50, 1, 2, 4, 51, 1, 2, 3, 52]
    # Behind the first place, not at it; and by three tokens rather than by two.
    assert followed([1, 2, 3, 50, 9, 1, 2], repeated).draft(2) == [4, 51]
    assert followed([1, 2, 3, 50, 9, 9, 1, 2, 3], repeated).draft(1) == [52]


def test_places_of_a_pair() -> None:
    dice = np.random.default_rng(0)
    ids = dice.integers(0, 4, 300).astype(np.int32)
    text = PredictedText(ids)
    for _ in range(50):
        pair, anchor = (int(dice.integers(0, 5)), int(dice.integers(0, 5))), int(dice.integers(301))
        ends = [at + 2 for at in range(299) if (ids[at], ids[at + 1]) == pair]
        behind = [end for end in ends if end > anchor][:4]
        before = [end for end in reversed(ends) if end <= anchor][:4]
        assert text.ends(pair, anchor) == behind + before
    for few in ([], [1]):
        assert PredictedText(np.array(few, np.int32)).ends((1, 1), 0) == []


def test_where_little_is_right_it_is_looked_for_now_and_then_and_found_again() -> None:
    text, looked = PredictedText(np.array(TEXT, np.int32)), []
    prediction = Drafter(text, 0)
    tokens = np.array([7, 8] * 400 + TEXT, np.int32)
    for length in range(1, len(tokens) + 1):
        if length >= prediction.until:
            looked.append(length)
        prediction.follow(tokens, length)
    assert len([at for at in looked if at <= 800]) < 100
    assert prediction.sure and prediction.at == len(TEXT)


def test_how_much_is_worth_drafting() -> None:
    right = followed(TEXT[:20])
    assert 0.94 < right.next_right < 0.96  # as if one in 23 or so were wrong
    count, saves = right.worth(0.05)
    assert count == MAX_DRAFT == right.worth(0.0)[0]
    assert saves == pytest.approx(sum(right.next_right**k for k in range(1, 33)) - 32 * 0.05)
    assert followed(TEXT[:50]).worth(0.0)[0] == 10  # what is left
    assert right.worth(1.0) == (0, 0.0)
    wrong = followed([7, 8] * 40, TEXT)  # a guess, and then the place is lost
    assert wrong.worth(0.05) == (0, 0.0)
    # Where it goes on is always right, and what comes behind it never.
    half = followed([token for at in range(0, 40, 2) for token in (TEXT[at], 7)])
    assert (half.sure, half.worth(0.2)[0], half.worth(1.0)[0]) == (False, 1, 0)
    # Three of four are right.
    most = followed([token for at in range(0, 56, 4) for token in (*TEXT[at : at + 3], 7)])
    assert 2 <= most.worth(0.3)[0] <= 5
    assert most.worth(0.05)[0] >= most.worth(0.3)[0] > most.worth(0.8)[0]
    # What was found is no more believed where it was not right.
    elsewhere = followed([token for at in range(0, 40, 2) for token in (TEXT[at], 7, 8)][1:])
    assert elsewhere._rates.found[0] < 0.2 < elsewhere.next_right


def test_drafts_that_cost_too_much_are_not_made_again_before_much_is_right() -> None:
    prediction = followed(TEXT[:10])
    prediction.drafted(0, 3.0)
    assert prediction.won == -3.0 and prediction.worth(0.1)[0] > 0
    other = followed([*TEXT[:3], 7, *TEXT[4:6], 8, *TEXT[7:9]])
    assert other.sure and other.worth(0.1)[0] > 0
    other.missed = 1  # which counts as a token
    other.drafted(0, 1.5)
    assert other.won == -2.5 and not other.worth(0.1)[0]
    other.drafted(20, 6.0)
    assert other.won == 8.0 and other.worth(0.1)[0] > 0


def test_behind_a_replaced_token_of_a_recalled_text_one_token_is_drafted() -> None:
    """Another text rarely goes on as this one did: only a token that was right shows that."""
    recalled = Recalled(SuffixIndex(4096))
    recalled.index.open("", np.array(TEXT, np.int32))
    tokens = np.array([1, *TEXT[:10], 7, *TEXT[11:]], np.int32)
    own = recalled.index.open("", tokens[:1])
    drafter, longest = Drafter(None, 1, recalled, own), []
    for length in range(1, 16):
        drafter.follow(tokens, length)
        longest.append(drafter.worth(0.1)[0])
    assert longest[10] > 3 and longest[11] == 1 and longest[12] > 3
