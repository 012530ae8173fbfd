"""Around `rootlace simulate`: made-up traces."""

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.routing import main
from benchmarks.synthetic_traces import LOADS, write_trace
from rootlace.runtime.simulation.study import infinite_bound
from rootlace.runtime.simulation.trace import Load, Workload, read_trace


@pytest.mark.parametrize("load", sorted(LOADS))
def test_a_made_up_trace_is_read_and_repeats(load: str, tmp_path: Path) -> None:
    paths = [tmp_path / str(which) for which in range(3)]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        write_trace(300, seed, path, load)
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    trace = read_trace(paths[0])
    assert len(trace) == 300 and trace.format == "mooncake"
    shared = infinite_bound(Workload(trace, Load(granularity=32)))
    assert shared == 0 if load == "long-and-short" else shared > 0.2


def test_routers_are_compared(tmp_path: Path) -> None:
    figures = tmp_path / "routing.json"
    load = "--replicas 2 --requests 20 --routers exact ray-prefix --granularity 512"
    search = "--choices 3x1000 --first-rate 100 --precision 64"
    main([*load.split(), *search.split(), "--json", str(figures)])
    found = json.loads(figures.read_text())
    assert [rate["router"] for rate in found["rates"]] == ["exact", "ray-prefix"]
    assert all(rate["requests_per_second"] > 0 for rate in found["rates"])
    assert found["choices"][0]["route"] > 0


def test_loads_of_seeds_are_played_by_one_machine_for_all(tmp_path: Path) -> None:
    figures, recorded = tmp_path / "routing.json", tmp_path / "agents.jsonl"
    write_trace(60, 5, recorded, "agents")
    load = f"--replicas 4 --requests 10 --seeds 2 --made-up agents --trace recorded={recorded}"
    search = "--routers pooled exact exact:1 --granularity 512 --choices --precision 64 --played 2"
    main([*load.split(), *search.split(), "--first-rate", "30", "--json", str(figures)])
    found = json.loads(figures.read_text())
    (played,), rates = found["played"], found["rates"]
    assert played["load"] == "recorded" and played["requests"] == 20
    assert played["router_microseconds"] > 0
    keys = [(rate["seed"], rate["load"], rate["router"]) for rate in rates]
    routers = ("pooled", "exact", "exact:1")
    assert keys == list(itertools.product((0, 1), ("recorded", "agents"), routers))
    # The loads of two seeds are not the same.
    assert len({rate["hit_rate"] for rate in rates if rate["router"] == "pooled"}) == 4
    assert all(rate["requests_per_second"] > 0 for rate in rates)
