"""What a machine says of itself, and which kernels that leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootlace.kernels.native.build import NativeUnavailable
from rootlace.runtime.doctor import kernel_choice
from rootlace.runtime.doctor.kernel_choice import better_units, choose_on_cpu
from rootlace.runtime.doctor.machine import read_machine
from tests.native import native_library

EPYC = """processor : 0
model name\t: AMD EPYC 9755
flags\t\t: fpu sse2 avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16

processor : 1
model name\t: another
flags\t\t: fpu amx_tile amx_bf16
"""
NEOVERSE = "processor : 0\nFeatures\t: fp asimd bf16 i8mm\n"


def cpuinfo(root: Path, text: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(text)
    return root


def test_a_processor(tmp_path: Path) -> None:
    found = read_machine(cpuinfo(tmp_path, EPYC), [0, 1], "x86_64")
    assert found.processor == "AMD EPYC 9755"
    assert found.units == ("avx512-bf16", "avx512", "avx2") and found.lacks == ("amx",)
    assert found.cores.usable == 2
    assert 0 < found.memory_available < found.memory_total


def test_a_processor_of_another_kind(tmp_path: Path) -> None:
    found = read_machine(cpuinfo(tmp_path, NEOVERSE), [0], "aarch64")
    assert found.units == ("neon",) and found.lacks == ()


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = read_machine(tmp_path, [0], "riscv64")
    assert found.units == () and found.processor


@pytest.mark.parametrize(
    ("used", "refused", "said"),
    [
        ("avx512-bf16", "", ["amx: the processor does not have it"]),
        ("amx", "", []),
        (
            "avx2",
            "",
            [
                "amx: the processor does not have it",
                "avx512-bf16: the compiler that is installed does not know it",
                "avx512: the compiler that is installed does not know it",
            ],
        ),
    ],
)
def test_why_no_better_instructions(
    tmp_path: Path, used: str, refused: str, said: list[str]
) -> None:
    machine = read_machine(cpuinfo(tmp_path, EPYC), [0], "x86_64")
    assert list(better_units(machine, used, refused)) == said


def test_a_tile_unit_that_the_system_refuses(tmp_path: Path) -> None:
    machine = read_machine(cpuinfo(tmp_path, EPYC.split("\n\n")[1]), [0], "x86_64")
    assert better_units(machine, "avx512-bf16", "the system refuses it: EPERM") == (
        "amx: the system refuses it: EPERM",
    )


def test_without_a_compiler_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_best(_: object) -> None:
        raise NativeUnavailable("no C++ compiler was found (g++)")

    monkeypatch.setattr(kernel_choice, "load_best", load_best)
    found = choose_on_cpu(read_machine(), "auto", print)
    assert (found.name, found.library) == ("reference", None)
    assert found.why_not_better == ("native: no C++ compiler was found (g++)",)


def test_the_reference_where_it_is_asked_for() -> None:
    assert choose_on_cpu(read_machine(), "reference", print).name == "reference"


def test_this_machines_kernels_are_the_best_that_it_says_it_has() -> None:
    native_library()
    machine = read_machine()
    found = choose_on_cpu(machine, "auto", print)
    assert found.name == "native"
    assert found.instructions in (*machine.units, "generic")
    reasons = {reason.partition(":")[0] for reason in found.why_not_better}
    assert reasons.isdisjoint({found.instructions}) and reasons >= set(machine.lacks) - reasons
