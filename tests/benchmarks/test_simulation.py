"""Around `rootlace simulate`: made-up traces."""

from __future__ import annotations

from pathlib import Path

from benchmarks.synthetic_traces import write_trace
from rootlace.runtime.simulation.bounds import infinite_bound
from rootlace.runtime.simulation.trace import read_trace
from rootlace.runtime.simulation.workload import Load, Workload


def test_a_made_up_trace_is_read_and_repeats(tmp_path: Path) -> None:
    paths = [tmp_path / str(which) for which in range(3)]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        write_trace(300, seed, path)
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    trace = read_trace(paths[0])
    assert len(trace) == 300 and trace.format == "mooncake"
    assert infinite_bound(Workload(trace, Load(granularity=32))) > 0.2
