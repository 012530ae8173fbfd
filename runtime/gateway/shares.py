"""How what is bounded for all is shared by those who take of it."""

from __future__ import annotations


def kept_for_others(own: int, owners: int, taken: int, most: int, more: int = 1) -> bool:
    """Whether `more` for one that has `own` would be of the last eighth of `most`, which is for
    those that have less than the mean. Of all, `taken` are taken, by `owners`; whether there are
    `more` left at all is not asked."""
    return taken + more > most - most // 8 and own * max(owners, 1) >= taken
