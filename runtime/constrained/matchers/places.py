"""What is remembered of an automaton's states, as objects that lead to each other."""

from __future__ import annotations

from rootlace.runtime.contracts.plan import MaskRow

MAX_STEPS = 1 << 17
"""Steps between places are forgotten when there are so many."""


class Place:
    """A state, as far as a request that goes on needs to know it: a token is then one look into a
    small table, and a mask is there where it is needed."""

    __slots__ = ("mask", "onward", "quiet", "state")

    def __init__(self, state: int) -> None:
        self.state = state
        self.mask: MaskRow | None = None
        """Its row of masks, once that is filled."""
        self.quiet = False
        """Whether nothing is known to be forced here."""
        self.onward: dict[int, Place] = {}
        """By allowed token, the place after it, if more has to follow there."""


class Places:
    """Of one automaton; threads may share them."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._steps = 0

    @property
    def nbytes(self) -> int:
        return 300 * len(self._places) + 100 * self._steps

    def of(self, state: int) -> Place:
        known = self._places.get(state)
        return known if known is not None else self._places.setdefault(state, Place(state))

    def lead(self, place: Place, token_id: int, after: Place) -> None:
        """Remember a step."""
        if self._steps >= MAX_STEPS:
            self._forget_steps()
        self._steps += token_id not in place.onward
        place.onward[token_id] = after

    def forget(self) -> None:
        """Forget masks and steps."""
        self._forget_steps()
        for place in list(self._places.values()):
            place.mask = None

    def _forget_steps(self) -> None:
        self._steps = 0
        for place in list(self._places.values()):
            place.onward = {}
