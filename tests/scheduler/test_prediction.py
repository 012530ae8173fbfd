"""Where an output stands in what was predicted of it."""

from __future__ import annotations

import numpy as np
import pytest

from rootlace.runtime.scheduler.prediction import MAX_DRAFT, Prediction

TEXT = list(range(100, 160))


def followed(output: list[int], predicted: list[int] = TEXT) -> Prediction:
    prediction = Prediction(np.array(predicted, np.int32), 3)
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
    assert not prediction.draft(5) and not prediction.worth(0.0)


def test_of_several_places_the_next_one_and_the_longest() -> None:
    repeated = [1, 2, 3, 50, 1, 2, 4, 51, 1, 2, 3, 52]
    # Behind the first place, not at it; and by three tokens rather than by two.
    assert followed([1, 2, 3, 50, 9, 1, 2], repeated).draft(2) == [4, 51]
    assert followed([1, 2, 3, 50, 9, 9, 1, 2, 3], repeated).draft(1) == [52]


def test_how_much_is_worth_drafting() -> None:
    right = followed(TEXT[:40])
    assert right.rate > 0.99
    assert right.worth(0.05) == MAX_DRAFT == right.worth(0.0)
    assert right.worth(1.0) == 0
    wrong = followed([7, 8] * 40, TEXT)  # a guess, and then the place is lost
    assert wrong.worth(0.05) == 0
    # Where it goes on is always right, and what comes behind it never.
    half = followed([token for at in range(0, 40, 2) for token in (TEXT[at], 7)])
    assert (half.sure, half.worth(0.2), half.worth(1.0)) == (False, 1, 0)
    # Three of four are right.
    most = followed([token for at in range(0, 56, 4) for token in (*TEXT[at : at + 3], 7)])
    assert 2 <= most.worth(0.3) <= 5
    assert most.worth(0.05) > most.worth(0.3) > most.worth(0.8)
    # What was found is no more believed where it was not right.
    elsewhere = followed([token for at in range(0, 40, 2) for token in (TEXT[at], 7, 8)][1:])
    assert elsewhere.found < 0.2 < elsewhere.rate


def test_drafts_that_cost_too_much_are_not_made_again_before_much_is_right() -> None:
    prediction = followed(TEXT[:10])
    prediction.drafted(10, 0, 0.3)
    assert prediction.won == -3.0 and prediction.worth(0.1) > 0
    other = followed([*TEXT[:3], 7, *TEXT[4:6], 8, *TEXT[7:9]])
    assert other.sure and other.worth(0.1) > 0
    other.drafted(10, 0, 0.3)
    assert not other.worth(0.1)
    other.drafted(20, 20, 0.3)
    assert other.won == 8.0 and other.worth(0.1) > 0
