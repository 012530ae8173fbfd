"""The ahead-of-time compilation: what is in order passes, and every kind of fault is named."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

ROOT = Path(__file__).resolve().parents[2]
BAD = "tests.scripts.bad_kernels"


def compile_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user does: here kernels are interpreted, which it refuses."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), inherited]))
    return subprocess.run(
        [sys.executable, "scripts/compile_kernels.py", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What is printed and written of the kernels with faults."""
    path = tmp_path_factory.mktemp("kernels") / "out.json"
    done = compile_kernels(BAD, "--arch", "90", "--json", str(path), "--processes", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("spilling_kernel", "spills "),
        ("misspelled_kernel", "does not compile: CompilationError: NameError"),
        ("product_kernel", "does not use the matrix units"),
        ("greedy_kernel", "bytes of shared memory; there are 232448"),
    ],
)
def test_a_fault_is_named(bad: tuple[str, dict[str, Any]], kernel: str, fault: str) -> None:
    output, content = bad
    (report,) = [report for report in content["variants"] if report["kernel"] == kernel]
    (found,) = report["faults"]
    assert fault in found
    assert f"{kernel} ({report['variant']}), sm_90: {found}" in output


def test_what_has_no_fault_passes_beside_them(bad: tuple[str, dict[str, Any]]) -> None:
    (report,) = [report for report in bad[1]["variants"] if report["kernel"] == "good_kernel"]
    assert report["faults"] == []
    assert report["registers"] > 0
    assert report["spilled"] == 0
    (greedy,) = [report for report in bad[1]["variants"] if report["kernel"] == "greedy_kernel"]
    assert greedy["matrix_units"] == "wgmma.mma_async"


def test_a_kernel_without_a_variant_is_named(bad: tuple[str, dict[str, Any]]) -> None:
    assert bad[1]["missing"] == [f"{BAD}.forgotten_kernel: no variant compiles it"]
    assert bad[1]["missing"][0] in bad[0]


def test_nothing_is_interpreted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert script()["main"](["layers"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_an_unknown_module_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert script()["main"](["no_such_kernel"]) == 2
    assert "no_such_kernel" in capsys.readouterr().err


def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "compile_kernels.py"), run_name="script")


FOUND_BY_A_LAUNCH = """
import sys
from pathlib import Path
from unittest.mock import patch
import torch
from triton.runtime.jit import JITFunction
import compile_kernels as script
from rootlace.kernels.triton.layers import add_rms_norm, rms_norm

def compiled():
    return len(list(Path(sys.argv[1]).glob("*/*.cubin")))

jobs = [script.Job("rootlace.kernels.triton.layers", 90, index) for index in range(2)]
assert [script.warm(job) for job in jobs] == ["", ""]
before = compiled()
launch = JITFunction.run
JITFunction.run = lambda self, *given, grid, warmup, **named: launch(
    self, *given, grid=grid, warmup=True, **named
)
with patch("torch.cuda.get_device_capability", lambda *device: (9, 0)):
    x, weight = torch.ones(4, 2048).bfloat16(), torch.ones(2048).bfloat16()
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    assert compiled() == before == 2, (before, compiled())
    rms_norm(torch.ones(4, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-5)
    assert compiled() == 3
"""


@pytest.mark.slow
def test_what_is_compiled_into_the_cache_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    """In a process of its own: it pretends to have a GPU, on which nothing runs."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(ROOT / "scripts"),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", FOUND_BY_A_LAUNCH, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
