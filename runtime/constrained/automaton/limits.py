"""What an automaton raises when it would grow beyond its bounds."""

from __future__ import annotations

from rootlace.wire.errors import InvalidConstraint


class TooLarge(InvalidConstraint):
    """The automaton would have more states than it may. Another engine may still hold it."""
