"""How much the values of a JSON text cost to be made, told from its characters.

What makes them keeps the interpreter to itself until all are made; numpy, which counts characters,
lets others run meanwhile.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CONTAINER = 12
"""An array, an object, or a member of one, costs as much as so many numbers of an array."""

_WEIGHTS = {",": 1, "[": CONTAINER, "{": CONTAINER, ":": CONTAINER}
_QUOTE, _BACKSLASH = ord('"'), ord("\\")

_Bytes = npt.NDArray[np.uint8]
_Places = npt.NDArray[np.intp]


def weight_beyond(raw: bytes | memoryview, most: int) -> bool:
    """Whether the values weigh more than `most`: a number is 1, a string 2."""
    text = np.frombuffer(raw, np.uint8)
    marks = {mark: int(np.count_nonzero(text == ord(mark))) for mark in _WEIGHTS}
    quotes = int(np.count_nonzero(text == _QUOTE))
    if sum(_WEIGHTS[mark] * count for mark, count in marks.items()) + quotes // 2 <= most:
        return False
    # What stands in strings is text, but was counted.
    quotes_at = _closing(text)
    weight = quotes_at.size // 2
    for mark, each in _WEIGHTS.items():
        places = np.flatnonzero(text == ord(mark))
        within = np.searchsorted(quotes_at, places) & 1
        weight += each * int(np.count_nonzero(within == 0))
    return weight > most


def _closing(text: _Bytes) -> _Places:
    """Where strings begin and end: quotes that an even number of backslashes stands before."""
    quotes = np.flatnonzero(text == _QUOTE)
    slashes = np.flatnonzero(text == _BACKSLASH)
    if not slashes.size:
        return quotes
    # For each backslash, where its run begins; for each quote, the run that ends before it.
    begins = np.ones(slashes.size, bool)
    begins[1:] = np.diff(slashes) != 1
    run = np.maximum.accumulate(np.where(begins, slashes, 0))
    last = np.searchsorted(slashes, quotes) - 1
    follows = (last >= 0) & (slashes[last] == quotes - 1)
    length = np.where(follows, quotes - run[last], 0)
    return quotes[length % 2 == 0]
