"""Steps on an executor: one after the other, or each planned while the one before it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from rootlace.runtime.contracts.plan import Executor, ExecutorLost, Launched, StepPlan
from rootlace.runtime.contracts.step_record import StepRecord
from rootlace.runtime.contracts.update import Update
from rootlace.runtime.scheduler.scheduler import Scheduler
from rootlace.wire.errors import InternalError, RootlaceError

log = logging.getLogger(__name__)


class Steps:
    """Takes plans from the scheduler to the executor, and results back.

    With `overlap`, a step is launched while the one before it runs, and only then is that one's
    result waited for and committed: the executor never waits for the host, as long as planning
    takes less than a step. What the one before finds is sent as soon as it is there.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        overlap: bool,
        send: Callable[[list[Update]], None],
        record: StepRecord | None = None,
        note: Callable[[StepPlan, float], None] | None = None,
        move: Callable[[np.ndarray], None] | None = None,
    ) -> None:
        """`send` is called with updates that should not wait until the step is over. `record` is
        told which step is under way, `note` how many seconds each took. `move` moves blocks between
        the pool and what is below it."""
        self._scheduler = scheduler
        self._executor = executor
        self._overlap = overlap
        self._send = send
        self._record = record
        self._note = note
        self._begun = [0.0, 0.0]
        """When the steps under way began, by their numbers modulo 2."""
        self._ended = 0.0
        """When the last step did."""
        self._move = move
        self._running: Launched | None = None
        self.count = 0
        """Steps committed or failed."""
        self.busy = 0.0
        """Seconds in `step`."""
        self.waited = 0.0
        """Those of them spent in the executor: launching, or waiting for results."""
        self.planned = False
        """Whether there was a step the last time."""

    def step(self) -> list[Update]:
        """Plan, run and commit what can be; returns the updates. Does nothing if there is no work.

        What a step raises ends its requests; only `ExecutorLost` is raised on.
        """
        started = time.perf_counter()
        count = self.count
        updates = self._overlapped() if self._overlap else self._plain()
        if self._running is not None or self.count > count:
            self.busy += time.perf_counter() - started
        return updates

    def finish(self) -> list[Update]:
        """Wait for the step under way, if there is one."""
        running, self._running = self._running, None
        return [] if running is None else self._land(running)[0]

    # ------------------------------------------------------------ the two ways

    def _plain(self) -> list[Update]:
        plan = self._plan()
        if plan is None:
            return self._scheduler.take_updates()
        self._before_waiting(plan)
        self._begin(plan)
        try:
            before = time.perf_counter()
            result = self._executor.run(plan)
            self.waited += time.perf_counter() - before
        except Exception as error:
            return self._failed(plan, error)
        self._end(plan)
        return self._scheduler.commit(plan, result)

    def _overlapped(self) -> list[Update]:
        plan = self._plan()
        updates = self._scheduler.take_updates()
        running, self._running = self._running, None
        launched, fault = self._launch(plan)
        if running is not None:
            landed, healthy = self._land(running)
            updates += landed
            if not healthy:  # the scheduler dropped what was planned behind
                if launched is not None:
                    self._discard(launched)
                elif plan is not None:
                    self._over(plan)
                return updates
        if plan is None:
            return updates
        if launched is not None and plan.late:
            fault = self._sample(launched)
            if fault is not None:
                self._collect_and_drop(launched)
        if fault is not None:
            return updates + self._failed(plan, fault)
        self._running = launched
        return updates

    # ------------------------------------------------------------ parts of a step

    def _plan(self) -> StepPlan | None:
        """The next step, once all is moved that is to be moved before it."""
        plan = self._scheduler.plan()
        self.planned = plan is not None
        moves = self._scheduler.kv.tiering.take_moves()
        if self._move is not None:
            try:
                self._move(moves)
            except Exception as error:  # nobody knows what the pool holds then
                raise ExecutorLost(f"blocks could not be moved: {error!r}") from error
        return plan

    def _before_waiting(self, plan: StepPlan) -> None:
        """Send what is held back: a step that computes prompts may take long."""
        if updates := self._scheduler.held_back(plan):
            self._send(updates)

    def _begin(self, plan: StepPlan) -> None:
        if self._record is not None:
            self._record.begin(plan.step, plan.rids, plan.context_len)
        if self._note is not None:
            self._begun[plan.step % 2] = time.perf_counter()

    def _end(self, plan: StepPlan, failed: bool = False) -> None:
        """A step was computed, or failed."""
        self.count += 1
        self._over(plan)
        if self._note is not None and not failed:
            now = time.perf_counter()
            self._note(plan, now - max(self._begun[plan.step % 2], self._ended))
            self._ended = now

    def _over(self, plan: StepPlan) -> None:
        """A step is not under way any more."""
        if self._record is not None:
            self._record.end(plan.step)

    def _launch(self, plan: StepPlan | None) -> tuple[Launched | None, Exception | None]:
        if plan is None:
            return None, None
        before = time.perf_counter()
        self._begin(plan)
        try:
            return self._executor.launch(plan), None
        except Exception as error:
            return None, error
        finally:
            self.waited += time.perf_counter() - before

    def _sample(self, launched: Launched) -> Exception | None:
        try:
            self._executor.sample(launched, self._scheduler.late_samples(launched.plan))
        except Exception as error:
            return error
        return None

    def _land(self, running: Launched) -> tuple[list[Update], bool]:
        """The result of a step; and whether it ran to its end."""
        self._before_waiting(running.plan)
        before = time.perf_counter()
        try:
            result = self._executor.collect(running)
        except Exception as error:
            return self._failed(running.plan, error), False
        finally:
            self.waited += time.perf_counter() - before
        self._end(running.plan)
        return self._scheduler.commit(running.plan, result), True

    def _discard(self, launched: Launched) -> None:
        """Have the executor end a step that nobody wants the result of."""
        if launched.plan.late:
            self._sample(launched)
        self._collect_and_drop(launched)

    def _collect_and_drop(self, launched: Launched) -> None:
        try:
            self._executor.collect(launched)
        except ExecutorLost:
            raise
        except Exception:
            log.exception("step %d, which was given up, failed", launched.plan.step)
        self._over(launched.plan)

    def _failed(self, plan: StepPlan, error: Exception) -> list[Update]:
        if isinstance(error, ExecutorLost):
            raise error
        log.error("step %d of %d rows failed", plan.step, plan.num_rows, exc_info=error)
        self._end(plan, failed=True)
        reason = error if isinstance(error, RootlaceError) else InternalError(repr(error))
        return self._scheduler.fail(plan, reason)
