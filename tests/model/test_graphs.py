"""Which buckets there are, and when a piece of work becomes a graph."""

from collections.abc import Callable

import pytest

from rootlace.runtime.model.executor.staging import (
    CAPTURE_SHARE,
    MOST_FAILURES,
    USES_BEFORE_CAPTURE,
    Graphs,
    bucket_of,
    decode_buckets,
)
from tests.model.fake_device import FakeDevice


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (12, [1, 2, 4, 8, 12]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (256, [1, 2, 4, *range(8, 257, 8)]),
        (300, [1, 2, 4, *range(8, 257, 8), 288, 300]),
    ],
)
def test_buckets(most: int, expected: list[int]) -> None:
    assert decode_buckets(most) == expected


@pytest.mark.parametrize("most", [1, 7, 100, 333, 1024])
def test_every_number_of_rows_has_the_smallest_bucket_that_holds_it(most: int) -> None:
    buckets = decode_buckets(most)
    for count in range(1, most + 1):
        assert bucket_of(count, buckets) == min(size for size in buckets if size >= count)
    assert bucket_of(most + 1, buckets) is None


class SlowDevice(FakeDevice):
    """Capturing takes a second of `now`."""

    now = 0.0
    error: Exception | None = None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.now += 1.0
        if self.error is not None:
            raise self.error
        return super().capture(work)

    def clock(self) -> float:
        return self.now


def test_work_is_captured_once_it_was_done_a_few_times() -> None:
    device = SlowDevice()
    graphs = Graphs(device, True, 100, device.clock)
    done = []
    for use in range(6):
        by_graph = graphs.run("a", lambda: done.append(len(done)))
        assert by_graph == (use >= USES_BEFORE_CAPTURE)
    assert done == [0, 1, 2, 3, 4, 5]
    assert (graphs.count.captured, graphs.count.replayed) == (1, 6 - USES_BEFORE_CAPTURE)
    assert graphs.count.seconds == 1.0
    assert "a" in graphs and "b" not in graphs


def test_capturing_takes_no_more_than_its_share_of_a_busy_servers_time() -> None:
    device = SlowDevice()
    graphs = Graphs(device, True, 100, device.clock)
    start, steps = device.now, 0
    for round in range(40):  # ever new shapes of work, each of which would be captured
        for key in range(round + 1):
            graphs.run(key, lambda: None)
            device.now += 0.1
            steps += 1
    share = graphs.count.seconds / (device.now - start)
    assert 0.5 * CAPTURE_SHARE < share <= CAPTURE_SHARE + 1.0 / (device.now - start)


def test_a_graph_too_many_takes_the_place_of_the_one_replayed_longest_ago() -> None:
    device = FakeDevice()
    graphs = Graphs(device, True, 2, lambda: 0.0)

    def use(key: str) -> bool:
        return graphs.run(key, lambda: None)

    for key in "ab":
        for _ in range(USES_BEFORE_CAPTURE):
            use(key)
    assert use("b") and use("a")
    waits = len(device.events)
    for _ in range(USES_BEFORE_CAPTURE):
        use("c")
    assert "a" in graphs and "c" in graphs and "b" not in graphs
    assert graphs.count.dropped == 1
    # It may have been running.
    assert len(device.events) == waits + 1 and device.events[-1].waits == 1
    assert not use("b")  # it has to be needed anew
    assert "b" not in graphs


def test_what_fails_is_not_tried_again() -> None:
    device = SlowDevice()
    device.error = RuntimeError("not permitted")
    graphs = Graphs(device, True, 100, device.clock)
    done = []
    for _ in range(5):
        assert not graphs.run("a", lambda: done.append(1))
    assert len(done) == 5 and graphs.count.failed == 1
    assert graphs.missing(["a", "b"]) == ["b"]


def test_where_nothing_can_be_captured_no_more_is_tried() -> None:
    device = SlowDevice()
    graphs = Graphs(device, True, 100, lambda: 0.0)
    for _ in range(USES_BEFORE_CAPTURE):
        graphs.run("before", lambda: None)
    device.error = RuntimeError("not permitted")
    tries = device.now
    for key in range(10):
        for _ in range(3):
            assert not graphs.run(key, lambda: None)
    assert device.now - tries == MOST_FAILURES == graphs.count.failed
    assert graphs.run("before", lambda: None), "what there is stays"


def test_without_graphs_nothing_is_captured() -> None:
    device = SlowDevice()
    graphs = Graphs(device, False, 100, device.clock)
    for _ in range(5):
        assert not graphs.run("a", lambda: None)
    assert graphs.missing(["a"]) == [] and device.captures == 0
