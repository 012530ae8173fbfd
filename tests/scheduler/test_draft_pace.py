"""Measured cost of drafts, from steps with drafts and steps without."""

import pytest

from rootlace.runtime.scheduler.speculation import DraftPace


def test_what_a_drafted_token_costs() -> None:
    pace = DraftPace()
    assert pace.price(16) == (0.0, 1.0)

    def of(rows: int, drafted: int) -> float:
        """Return the cost of a draft, as a part of a row's share of a step."""
        fixed, token = pace.price(rows)
        return fixed + drafted * token

    for _ in range(40):
        pace.note(8, 0, 10e-3)
        pace.note(8, 10, 12e-3)
        pace.note(2, 0, 9e-3)
    assert of(8, 10) == pytest.approx(8 * 2 / 10, rel=0.25)
    assert of(2, 10) == pytest.approx(2 * 2 / 9, rel=0.25)
    assert of(3, 10) == pytest.approx(of(2, 10) * 3 / 2)
    before = of(8, 10)
    pace.note(8, 10, 9.0)  # held up
    assert of(8, 10) < 1.7 * before
    for _ in range(20):  # it costs too much
        pace.note(8, 10, 90e-3)
    assert of(8, 10) > 10
    for _ in range(1500):
        pace.note(8, 0, 10e-3)
    assert of(8, 10) < 9  # which is tried again
    for _ in range(99):  # steps without drafts are held up, now and then for long
        pace.note(8, 0, 90e-3)
        pace.note(8, 10, 12e-3)
    assert pace.price(8)[1] >= 8 / 64


def test_what_it_costs_that_there_are_drafts() -> None:
    pace = DraftPace()
    for at in range(60):
        pace.note(4, 0, 10e-3)
        drafted = 1 + at * 7 % 30
        pace.note(4, drafted, 14e-3 + drafted * 0.5e-3)
    fixed, token = pace.price(4)
    assert pace.note(4, 0, 10e-3) == 1.0
    assert pace.note(4, 5, 10e-3 + 2 * (4e-3 + 5 * 0.5e-3)) == pytest.approx(2, rel=0.2)
    assert fixed == pytest.approx(4 * 4 / 10, rel=0.15)
    assert token == pytest.approx(4 * 0.5 / 10, rel=0.15)


@pytest.mark.parametrize("lengths", [(9,), (7, 8, 9), (30, 4)])
def test_drafts_of_like_lengths_do_not_seem_to_cost_by_themselves(lengths: tuple[int, ...]) -> None:
    """A long draft would then look cheap, and a short one dear."""
    pace = DraftPace()
    for at in range(30):
        pace.note(1, 0, 4e-3)
        drafted = lengths[at % len(lengths)]
        pace.note(1, drafted, 4e-3 + drafted * 1e-3)
    fixed, token = pace.price(1)
    assert fixed < 0.1
    assert token == pytest.approx(0.25, rel=0.1)
