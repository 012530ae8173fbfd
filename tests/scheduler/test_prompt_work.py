"""How much of the waiting prompts is to be computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rootlace.runtime.scheduler.queue import PromptWork


def waiting(number: int, tokens: list[int]) -> Any:
    """As much of a sequence as is looked at."""
    ids = np.array(tokens, np.int32)
    return SimpleNamespace(
        number=number,
        tokens=ids,
        length=len(ids),
        namespace="",
        finished=False,
        request=SimpleNamespace(namespace="", adapter=""),
    )


def test_what_another_one_shares_that_is_over_is_to_be_computed() -> None:
    work = PromptWork(lambda sequence: 0)
    first, second = waiting(0, [1, 2, 3, 4]), waiting(1, [1, 2, 3, 9, 9])
    assert work.of_waiting([first, second], 0.0) == 4 + 2
    third = waiting(2, [1, 2, 3, 5])
    assert work.of_next(third) == 1
    second.finished = True  # aborted, and nothing of it is in the cache
    assert work.of_next(third) == 1
    first.finished = True
    assert work.of_next(third) == 4
    assert work.of_waiting([third], 0.1) == 4
    assert work.of_next(waiting(3, [1, 2, 3, 5, 6])) == 1
