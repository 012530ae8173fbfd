"""What the scheduler is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rootlace.runtime.contracts.plan import AutomatonState, MaskRow
from rootlace.wire.protocol import SamplingParams


class Matcher(Protocol):
    """State of one request's constraint; `rootlace.runtime.contracts.matcher.Matcher` says
    what each method does."""

    ready: MaskRow | None

    def fill_bitmask(self, out: np.ndarray) -> None: ...

    def mask_row(self) -> MaskRow | None: ...

    def prepare_mask(self) -> None: ...

    def automaton(self) -> AutomatonState | None: ...

    def advance(self, token_id: int) -> bool: ...

    def try_advance_fast(self, token_id: int, jumps: bool) -> bool: ...

    def is_finished(self) -> bool: ...

    def forced_tokens(self) -> list[int]: ...

    def can_retreat(self) -> bool: ...

    def retreat(self) -> int | None: ...

    def error(self) -> str: ...


@dataclass(slots=True)
class Request:
    """One sequence to complete.

    `token_ids` is the prompt (int32, not empty). In `params`, `max_tokens` is a number, `n` is 1,
    `seed` is set and `stop_token_ids` holds every id that ends the request. `output_ids` (int32)
    are tokens generated for it earlier; they count toward `max_tokens`, and `matcher` has taken
    them in. With `jump_forward`, tokens that the matcher forces are appended without sampling.
    `waited` are seconds that it waited elsewhere before; they count as queued. Of its tokens the
    first is told at once, then `emit_every` at a time, at most every `emit_seconds`, and at the end
    all.
    """

    rid: int
    token_ids: np.ndarray
    params: SamplingParams
    output_ids: np.ndarray | None = None
    namespace: str = ""
    program: str = ""
    matcher: Matcher | None = None
    jump_forward: bool = False
    waited: float = 0.0
    emit_every: int = 1
    emit_seconds: float = 0.0
