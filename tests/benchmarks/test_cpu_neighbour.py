"""The benchmark of steps beside other programs: these are on their cores, and gone afterwards."""

import os
from pathlib import Path

import psutil
import pytest

from benchmarks import cpu_neighbour
from benchmarks.cpu_neighbour import measure, neighbours
from benchmarks.cpu_steps import Case
from tests.model.checkpoints import configs, save
from tests.native import native_library
from tests.waiting import eventually


def test_steps_are_counted_alone_and_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_library()
    save(configs()["llama"], tmp_path)
    monkeypatch.setattr(cpu_neighbour, "REST", 0.0)
    monkeypatch.setattr(cpu_neighbour, "CASES", (Case("decode", 3, 1, 20),))
    [result] = measure("tiny", tmp_path, threads=1, count=0, turns=2, seconds=0.01)
    assert len(result.alone) == len(result.beside) == 2
    assert min(*result.alone, *result.beside) > 0 and result.share > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="programs are not bound to cores")
def test_a_neighbour_has_one_core() -> None:
    before = set(psutil.Process().children())
    with neighbours(1):
        [program] = set(psutil.Process().children()) - before
        eventually(lambda: len(program.cpu_affinity()) == 1)
    assert not program.is_running()
