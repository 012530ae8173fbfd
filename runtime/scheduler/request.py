"""What the scheduler is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rootlace.protocol import SamplingParams


class Matcher(Protocol):
    """State of one request's constraint: which tokens may come next."""

    def fill_mask(self, out: np.ndarray) -> None:
        """Set the packed bitmask of allowed tokens (int32 words; see `SampleRow.mask`)."""

    def advance(self, token_id: int) -> bool:
        """Take a token in; False if the constraint does not allow it."""

    def is_finished(self) -> bool:
        """Nothing but the end of the sequence can follow."""

    def error(self) -> str:
        """Why the constraint can go no further, after `advance` gave False; empty if it can."""


@dataclass(slots=True)
class Request:
    """One sequence to complete.

    `token_ids` is the prompt (int32, not empty). In `params`, `max_tokens` is a number, `n` is 1,
    `seed` is set and `stop_token_ids` holds every id that ends the request. `output_ids` (int32)
    are tokens generated for it earlier; they count toward `max_tokens`, and `matcher` has taken
    them in.
    """

    rid: int
    token_ids: np.ndarray
    params: SamplingParams
    output_ids: np.ndarray | None = None
    namespace: str = ""
    program: str = ""
    matcher: Matcher | None = None
