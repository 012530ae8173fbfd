"""What a machine says of itself, and which kernels that leads to."""

from pathlib import Path

import pytest
import torch

from rootlace.kernels.native.build import InstructionSet, NativeUnavailable, read_processor
from rootlace.runtime.doctor import report
from rootlace.runtime.doctor.report import better_units, choose_on_cpu, choose_on_gpu
from rootlace.wire.errors import InvalidRequest
from tests.native import native_library

V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"
EPYC = f"""processor : 0
model name\t: AMD EPYC 9755
flags\t\t: fpu sse2 {V3} {V4} avx512_bf16 avx512_vnni

processor : 1
model name\t: another
flags\t\t: fpu {V3} {V4} avx512_bf16 avx512_vnni amx_tile amx_bf16 amx_int8
"""
NEOVERSE = "processor : 0\nFeatures\t: fp asimd asimddp bf16 i8mm\n"


def cpuinfo(root: Path, text: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(text)
    return root


def names(sets: tuple[InstructionSet, ...]) -> list[str]:
    return [one.name for one in sets]


def test_a_processor(tmp_path: Path) -> None:
    found = read_processor(cpuinfo(tmp_path, EPYC), "x86_64")
    assert found.name == "AMD EPYC 9755"
    assert names(found.has) == ["avx512-bf16", "avx512", "avx2", "generic"]
    assert names(found.lacks) == ["amx"]


def test_a_processor_of_another_kind(tmp_path: Path) -> None:
    found = read_processor(cpuinfo(tmp_path, NEOVERSE), "aarch64")
    assert names(found.has) == ["neon-bf16", "neon"] and not found.lacks


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = read_processor(tmp_path, "riscv64")
    assert not found.has and found.name


@pytest.mark.parametrize(
    ("used", "prebuilt", "said"),
    [
        ("avx512-bf16", False, ["amx: the processor does not have it"]),
        ("amx", False, []),
        (
            "avx2",
            False,
            [
                "amx: the processor does not have it",
                "avx512-bf16: the compiler that made the library does not know it",
                "avx512: the compiler that made the library does not know it",
            ],
        ),
        (
            "avx512",
            True,
            [
                "amx: the processor does not have it",
                "avx512-bf16: the library that came with the package was compiled without it",
            ],
        ),
    ],
)
def test_why_no_better_instructions(
    tmp_path: Path, used: str, prebuilt: bool, said: list[str]
) -> None:
    processor = read_processor(cpuinfo(tmp_path, EPYC), "x86_64")
    assert list(better_units(processor, used, "", prebuilt)) == said


def test_a_system_that_does_not_say_what_the_processor_has(tmp_path: Path) -> None:
    processor = read_processor(tmp_path, "arm64")  # a Mac has no /proc
    assert better_units(processor, "neon", "", False) == (
        "neon-bf16: the system does not say whether the processor has it",
    )


def test_a_tile_unit_that_the_system_refuses(tmp_path: Path) -> None:
    processor = read_processor(cpuinfo(tmp_path, EPYC.split("\n\n")[1]), "x86_64")
    assert better_units(processor, "avx512-bf16", "the system refuses it: EPERM", False) == (
        "amx: the system refuses it: EPERM",
    )


def test_without_a_compiler_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_best(*_: object) -> None:
        raise NativeUnavailable("no C++ compiler was found (g++)")

    monkeypatch.setattr(report, "load_best", load_best)
    found = choose_on_cpu(read_processor(), "auto", print)
    assert (found.name, found.library) == ("reference", None)
    assert found.why_not_better == ("native: no C++ compiler was found (g++)",)
    with pytest.raises(InvalidRequest, match="kernels 'native': no C\\+\\+ compiler was found"):
        choose_on_cpu(read_processor(), "native", print)


def test_native_kernels_asked_of_a_gpu() -> None:
    with pytest.raises(InvalidRequest, match="are a CPU's"):
        choose_on_gpu(torch.device("cuda", 0), "native")


def test_the_reference_where_it_is_asked_for() -> None:
    assert choose_on_cpu(read_processor(), "reference", print).name == "reference"


def test_this_machines_kernels_are_the_best_that_it_says_it_has() -> None:
    native_library()
    processor = read_processor()
    found = choose_on_cpu(processor, "auto", print)
    assert found.name == "native"
    assert found.instructions in names(processor.has)
    reasons = [reason.partition(":")[0] for reason in found.why_not_better]
    assert found.instructions not in reasons
    assert names(processor.lacks) == reasons[: len(processor.lacks)]
