"""Masks on other threads: all are there when waited for, and failures stay where they are."""

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rootlace.runtime.contracts.matcher import UNKNOWN
from rootlace.runtime.contracts.plan import MaskRow
from rootlace.runtime.scheduler import masks as masks_module
from rootlace.runtime.scheduler.masks import Job as MaskingJob
from rootlace.runtime.scheduler.masks import MaskJob, MaskThreads, StepMasks
from rootlace.wire.errors import InternalError
from tests.scheduler.matchers import Plain
from tests.scheduler.world import Job, World


class Table:
    """Row i allows token i alone."""

    _keys = itertools.count()

    def __init__(self) -> None:
        self.key = next(self._keys)
        self.rows = np.zeros((8, 1), np.int32)
        self.done: set[int] = set()

    def filled(self, row: int) -> bool:
        return row in self.done


class Counting(Plain):
    """Token i follows token i - 1; in a shared table or in masks of its own."""

    place = UNKNOWN

    def __init__(self, table: Table | None = None, fails: bool = False) -> None:
        self.table, self.fails, self.at = table, fails, 0
        self.threads: list[str] = []

    def mask_row(self) -> MaskRow | None:
        return None if self.table is None else MaskRow(self.table, self.at)

    def prepare_mask(self) -> None:
        assert self.table is not None and self.at not in self.table.done, "filled twice"
        self.threads.append(threading.current_thread().name)
        if self.fails:
            raise RuntimeError("no memory")
        self.table.rows[self.at] = 1 << self.at
        self.table.done.add(self.at)

    def fill_bitmask(self, out: np.ndarray) -> None:
        self.threads.append(threading.current_thread().name)
        if self.fails:
            raise RuntimeError("no memory")
        out[:] = 1 << self.at

    def advance(self, token_id: int) -> bool:
        assert token_id == self.at
        self.at += 1
        return True

    def is_finished(self) -> bool:
        return self.at == 6


@pytest.fixture
def filler():
    filler = MaskThreads(2)
    yield filler
    filler.close()


@pytest.mark.parametrize("shared", [False, True])
def test_requests_get_their_masks_in_time(filler, shared) -> None:
    world = World(vocab_size=8, filler=filler)
    table = Table() if shared else None
    matchers = [Counting(table) for _ in range(5)]
    for i, matcher in enumerate(matchers):
        world.submit([i], 9, constrain=lambda m=matcher: m, jump=False)
    waits = 0
    while world.scheduler.has_work:
        plan = world.step()
        waits += plan is not None and plan.wait_for_masks is not None
    assert all(job.output == [0, 1, 2, 3, 4, 5] for job in world.jobs.values())
    fills = sum(len(matcher.threads) for matcher in matchers)
    assert fills == (6 if shared else 30)
    assert waits == 6
    # With every row filled there is nothing to do, and nothing to wait for.
    if shared:
        world.submit([3], 9, constrain=lambda: Counting(table), jump=False)
        while world.scheduler.has_work:
            plan = world.step()
            assert plan is None or plan.wait_for_masks is None


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
def test_a_mask_that_cannot_be_filled_ends_its_request_alone(filler, threaded, shared) -> None:
    world = World(vocab_size=8, filler=filler if threaded else None)
    table = Table() if shared else None

    def submit(token: int, fails: bool) -> Job:
        matcher = Counting(table if fails or not shared else Table(), fails)
        return world.jobs[world.submit([token], 9, constrain=lambda: matcher, jump=False)]

    jobs = [submit(i, i == 1) for i in range(3)]
    world.drain()
    assert [job.finish for job in jobs] == ["stop", "error", "stop"]
    assert jobs[1].updates[-1].code == "constraint_not_met"
    if table is not None:  # the row was not spoilt for those who come later
        again = world.jobs[world.submit([1], 9, constrain=lambda: Counting(table), jump=False)]
        world.drain()
        assert again.output == [0, 1, 2, 3, 4, 5]


def test_masks_of_a_step_are_rows_of_one_array() -> None:
    masks, wait = StepMasks(40).start([Counting(), Counting(Table()), Counting()])
    array = masks[0].base
    assert wait is None and array.shape == (3, 2) and (array == 1).all()
    assert all(mask.base is array for mask in masks)


class Clock:
    """Clock in the place of `time`: only masks take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now

    perf_counter = thread_time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(masks_module, "time", clock)
    monkeypatch.setattr(Watched, "clock", clock)
    return clock


class Watched(Counting):
    """Matcher whose next mask takes a number of seconds; it records the threads of masks."""

    clock = Clock()
    seconds = 1e-6

    def fill_bitmask(self, out: np.ndarray) -> None:
        self.clock.now += self.seconds
        super().fill_bitmask(out)


@pytest.mark.usefixtures("clock")
def test_masks_that_were_quick_are_made_on_the_spot() -> None:
    handed: list[list[Watched]] = []

    class Noting:
        def start(self, jobs: Sequence[MaskingJob]) -> Callable[[], None] | None:
            handed.append([job.matcher for job in jobs])  # type: ignore[attr-defined]
            for job in jobs:
                job.run()
            return None

    masks = StepMasks(8, Noting(), spot_seconds=60.0)
    quick, slow, shared = Watched(), Watched(), Watched(Table())

    def step() -> list[Watched]:
        handed.clear()
        found, _ = masks.start([quick, slow, shared])
        assert all(isinstance(mask, MaskRow) or mask.tolist() == [1] for mask in found)
        return handed[0] if handed else []

    assert step() == [shared]  # rows that others share are never made on the spot
    slow.seconds = 0.05
    assert step() == []  # it was quick so far
    assert step() == [slow]
    slow.seconds = 1e-6
    assert step() == [slow]
    assert step() == []


@pytest.mark.usefixtures("clock")
def test_only_so_much_of_a_step_goes_into_masks_on_the_spot() -> None:
    handed: list[int] = []

    class Noting:
        def start(self, jobs: Sequence[MaskingJob]) -> Callable[[], None] | None:
            handed.append(len(jobs))
            for job in jobs:
                job.run()
            return None

    matchers = [Watched() for _ in range(5)]
    for matcher in matchers:
        matcher.seconds = 0.01
    masks, _ = StepMasks(8, Noting(), spot_seconds=0.015).start(matchers)
    assert handed == [3] and all(mask.tolist() == [1] for mask in masks)
    handed.clear()
    StepMasks(8, Noting(), spot_seconds=0.0).start(matchers)
    assert handed == [5]


def test_whoever_waits_helps(filler) -> None:
    """The jobs block until all of them run at once, one more than there are threads."""
    barrier = threading.Barrier(3, timeout=100)

    class Meeting(Counting):
        def fill_bitmask(self, out: np.ndarray) -> None:
            barrier.wait()

    jobs = [MaskJob(Meeting(), np.zeros(1, np.int32)) for _ in range(3)]
    wait = filler.start(jobs)
    assert wait is not None
    wait()
    assert barrier.n_waiting == 0 and not barrier.broken


def test_waiting_ends_when_the_last_mask_is_there_and_may_be_repeated(filler) -> None:
    gate = threading.Event()

    class Slow(Counting):
        def fill_bitmask(self, out: np.ndarray) -> None:
            gate.wait()
            out[:] = 1

    out = np.full((3, 1), 5, np.int32)
    matchers = [Slow(), Counting(fails=True), Slow()]
    wait = filler.start([MaskJob(*pair) for pair in zip(matchers, out, strict=True)])
    assert wait is not None
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    wait()
    assert out.tolist() == [[1], [0], [1]]
    wait()
    opener.join()


def test_a_step_that_fails_while_masks_are_filled_disturbs_no_later_one(filler) -> None:
    world = World(vocab_size=8, filler=filler)
    gate = threading.Event()

    class Late(Counting):
        def fill_bitmask(self, out: np.ndarray) -> None:
            gate.wait()
            super().fill_bitmask(out)

    first = world.jobs[world.submit([1], 9, constrain=Late, jump=False)]
    world.fail(InternalError("injected"))
    assert first.finish == "error"
    second = world.jobs[world.submit([1], 9, constrain=Counting, jump=False)]
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    world.drain()
    assert second.output == [0, 1, 2, 3, 4, 5]
    opener.join()


def test_a_filler_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="mask_threads"):
        MaskThreads(0)
