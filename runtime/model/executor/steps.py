"""What runs a runner's steps: on a CPU `plain_steps`, on a GPU `device_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rootlace.runtime.contracts.plan import SampleRow, StepPlan, StepResult


class Steps(Protocol):
    """`launch`, `sample`, `collect` and `overlaps` are those of `Executor`."""

    @property
    def overlaps(self) -> bool: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def sample(self, step: Any, samples: Sequence[SampleRow]) -> None: ...

    def collect(self, step: Any) -> StepResult: ...

    def work(self) -> AbstractContextManager[object]:
        """Within it operations on tensors come behind the steps launched before, and before the
        next one."""

    def prepare(self) -> bool:
        """See `ModelRunner.prepare`."""

    def stats(self) -> dict[str, int | float]:
        """See `ModelRunner.stats`."""
