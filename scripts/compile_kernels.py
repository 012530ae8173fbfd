"""Compile every Triton kernel ahead of time, on a machine without a GPU.

    python scripts/compile_kernels.py                     # all kernels, sm_80 and sm_90
    python scripts/compile_kernels.py layers --arch 90  # one module's, one architecture
    python scripts/compile_kernels.py --json out.json
    python scripts/compile_kernels.py --into-cache --processes 14   # for what runs here next

`kernel_launches.py` writes down what serving launches of each module of `rootlace.kernels.triton`;
another module lists its specialisations in `variants(arch)`. They are compiled to machine code, and
what the assembler says of each is printed: registers per thread, shared memory per program, bytes
spilled to memory, and which of the matrix units' PTX instructions it uses. The
exit status is 1, and the kernel is named, if one

- does not compile;
- spills registers to memory;
- needs more shared memory than a program may have on the architecture;
- should use the matrix units (`Variant.matrix_units`) and does not;
- is launched somewhere and in no variant.

Nothing is read from or kept in Triton's cache. `--into-cache` does the reverse: every variant is
compiled for this machine's GPU as a launch would (without a GPU: for `--arch`), so that the first
launches find it there; nothing is judged.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import json
import multiprocessing
import pkgutil
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import MockTensor

import rootlace.kernels.triton as kernels

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernel_launches import NAMES, Variant, variants

SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
"""Bytes of shared memory that one program may have (CUDA C++ Programming Guide, table of compute
capabilities), by compute capability."""
MATRIX_UNITS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
"""PTX instructions of the matrix units, newest first."""
LOG_WIDTH = 140
"""Columns of the table where nobody says how wide the output is."""
SERIALIZED = "wgmma.mma_async instructions are serialized"


@dataclass(frozen=True)
class Job:
    """The index-th variant of a module, which a worker finds again by itself."""

    module: str
    arch: int
    index: int


@dataclass
class Report:
    """Result for one variant. `faults`: reasons against landing it, in words."""

    module: str
    kernel: str
    variant: str
    arch: int
    seconds: float = 0.0
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    cubin: int = 0
    matrix_units: str = ""
    warnings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def kernel_modules(names: Sequence[str]) -> list[str]:
    """Return full names of the requested modules; by default of all modules with variants.

    A name without dots is one of `rootlace.kernels.triton`.
    """
    if names:
        return [name if "." in name else f"{kernels.__name__}.{name}" for name in names]
    found = (f"{kernels.__name__}.{entry.name}" for entry in pkgutil.iter_modules(kernels.__path__))
    return [name for name in found if _concerned(importlib.import_module(name))]


def _concerned(module: ModuleType) -> bool:
    return bool(variants_of(module, 90) or launched(module))


def launched(module: ModuleType) -> dict[str, Any]:
    """Return the kernels that a module launches, `kernel[grid](...)` in its source, by name."""
    names = {
        node.func.value.id
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    return {
        name: value
        for name in sorted(names)
        if isinstance(value := getattr(module, name, None), triton.JITFunction)
    }


def variants_of(module: ModuleType, arch: int) -> list[Variant]:
    if hasattr(module, "variants"):
        return list(module.variants(arch))
    return variants(arch).get(module.__name__, [])


def never_compiled(modules: Sequence[str], arch: int) -> list[str]:
    """Return a message for each kernel that no variant of any module compiles."""
    loaded = [importlib.import_module(name) for name in modules]
    # A kernel may be launched outside its module: any module's variant counts.
    compiled = {id(variant.kernel) for module in loaded for variant in variants_of(module, arch)}
    return [
        f"{module.__name__}.{name}: no variant compiles it"
        for module in loaded
        for name, kernel in launched(module).items()
        if id(kernel) not in compiled
    ]


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Let Triton compile anew and keep nothing."""
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        yield


def compile_variant(variant: Variant, arch: int) -> tuple[Any, str]:
    """Return the compiled kernel and the assembler's output. Raises Triton's errors."""
    source = ASTSource(
        variant.kernel,
        signature=variant.signature,
        constexprs={variant.place(name): value for name, value in variant.constants.items()},
        attrs={variant.place(name): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        # Explicit, because the default changes in Triton 3.10.
        "enable_fp_fusion": variant.fp_fusion,
    }
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        try:
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        except Exception as error:
            said = re.findall(r"^.*\b(?:error|fatal)\b.*$", log.getvalue(), re.MULTILINE)
            raise RuntimeError("\n".join([_brief(error), *said[:3]])) from error
    return compiled, log.getvalue()


def _brief(error: Exception) -> str:
    """Return kind and text of the last informative error in a chain."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    return f"{type(root).__name__}: {lines[-1] if lines else '(no message)'}"


def native_arch() -> int | None:
    """Return the compute capability of this machine's GPU, 90 for 9.0; None without one."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


class NoGPU:
    """Triton's driver without a GPU: names the target, runs nothing."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def warm(job: Job) -> str:
    """Compile one variant as a launch does, into Triton's cache. Return the error, or ""."""
    if not torch.cuda.is_available():
        triton.runtime.driver.set_active(NoGPU(job.arch))
    variant = variants_of(importlib.import_module(job.module), job.arch)[job.index]
    given: dict[str, Any] = dict(variant.constants)
    pointed = {kind: dtype for dtype, kind in NAMES.items()}
    for name, kind in variant.types.items():
        if kind.startswith("*"):
            given[name] = MockTensor(pointed[kind[1:]])
        elif kind.startswith("fp"):
            given[name] = 0.5
        else:
            given[name] = (1 << (40 if kind == "i64" else 8)) + (name not in variant.divisible)
    arguments = {
        name: tuple(given[f"{name}.{at}"] for at in range(len(kind)))
        if isinstance(kind, tuple)
        else given[name]
        for name, kind in variant.signature.items()
    }
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if not variant.fp_fusion:
        options["enable_fp_fusion"] = False
    try:
        variant.kernel.warmup(grid=(1,), **arguments, **options)
    except Exception as error:
        return f"{job.module}.{variant.kernel.__name__} ({variant.name}): {_brief(error)}"
    return ""


def warm_all(jobs: Sequence[Job], processes: int, seconds: float) -> list[str]:
    """Fill the cache for `seconds`, with `processes` at a time. Return failures and the rest."""
    deadline = time.monotonic() + seconds
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    pending = [pool.submit(warm, job) for job in jobs]
    wait(pending, timeout=max(0.0, deadline - time.monotonic()))
    failed = [said for one in pending if one.done() and (said := one.result())]
    left = sum(not one.done() for one in pending)
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.kill()
    return [*failed, *([f"{left} variants were not compiled in time"] if left else [])]


def bytes_spilled(log: str) -> int:
    """Return bytes of spill stores and loads in the assembler's output, over all functions."""
    return sum(int(size) for size in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))


def run(job: Job) -> Report:
    """Compile one variant and judge it."""
    variant = variants_of(importlib.import_module(job.module), job.arch)[job.index]
    module = job.module.removeprefix(f"{kernels.__name__}.")
    report = Report(module, variant.kernel.__name__, variant.name, job.arch)
    started = time.perf_counter()
    try:
        with fresh_cache():
            compiled, log = compile_variant(variant, job.arch)
    except RuntimeError as error:
        report.faults.append(f"does not compile: {error}")
        return report
    finally:
        report.seconds = round(time.perf_counter() - started, 2)
    used = re.search(r"Used (\d+) registers", log)
    if used is None:
        report.faults.append(f"the assembler does not say what it uses: {log.strip()!r}")
    else:
        report.registers = int(used[1])
    report.shared = int(compiled.metadata.shared)
    report.spilled = bytes_spilled(log)
    report.cubin = len(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    report.matrix_units = next((name for name in MATRIX_UNITS if name in ptx), "")
    if SERIALIZED in log:
        report.warnings.append("the matrix units' instructions wait for each other")
    report.faults += faults(report, variant)
    return report


def faults(report: Report, variant: Variant) -> list[str]:
    """Return reasons against landing a variant that compiles."""
    found = []
    if report.spilled:
        found.append(f"spills {report.spilled} bytes of registers")
    limit = SHARED_MEMORY[report.arch]
    if report.shared > limit:
        found.append(f"needs {report.shared} bytes of shared memory; there are {limit}")
    if variant.matrix_units and not report.matrix_units:
        found.append("does not use the matrix units")
    return found


def run_all(jobs: list[Job], processes: int, console: Console) -> list[Report]:
    """Return all reports in the order of the jobs, with a progress bar if there are processes."""
    if processes == 1:
        return [run(job) for job in jobs]
    reports: dict[Job, Report] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Spawned: a forked child would inherit locks of torch's and LLVM's threads without the threads.
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ProcessPoolExecutor(processes, mp_context=context) as pool,
    ):
        task = progress.add_task("compiling", total=len(jobs))
        pending = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(pending):
            reports[pending[future]] = future.result()
            progress.advance(task)
    return [reports[job] for job in jobs]


def table(reports: Sequence[Report]) -> Table:
    columns: list[tuple[str, Any]] = [("kernel", "left"), ("variant", "left"), ("arch", "left")]
    columns += [(name, "right") for name in ("registers", "shared", "spilled")]
    columns += [("matrix units", "left"), ("s", "right"), ("", "left")]
    result = Table(box=None, pad_edge=False)
    for name, side in columns:
        result.add_column(name, justify=side, no_wrap=name != "variant")
    for report in reports:
        note = "[red]FAULT[/red]" if report.faults else "slow" if report.warnings else ""
        result.add_row(
            report.kernel.removesuffix("_kernel").strip("_"),
            report.variant,
            f"sm_{report.arch}",
            str(report.registers),
            str(report.shared),
            str(report.spilled),
            report.matrix_units or "-",
            f"{report.seconds:.1f}",
            note,
        )
    return result


def sums(reports: Sequence[Report]) -> list[str]:
    """Return one line per architecture."""
    lines = []
    for arch in sorted({report.arch for report in reports}):
        part = [report for report in reports if report.arch == arch]
        names = {report.kernel for report in part}
        lines.append(
            f"sm_{arch}: {len(part)} variants of {len(names)} kernels, "
            f"{sum(bool(report.matrix_units) for report in part)} on the matrix units, "
            f"at most {max(report.registers for report in part)} registers and "
            f"{max(report.shared for report in part)} bytes of shared memory, "
            f"{sum(report.cubin for report in part) / 2**20:.1f} MiB of code, "
            f"{sum(report.seconds for report in part):.0f} s, "
            f"{sum(bool(report.faults) for report in part)} at fault"
        )
    return lines


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel without a GPU.")
    parser.add_argument("modules", nargs="*", help="modules with variants (all)")
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=sorted(SHARED_MEMORY),
        default=[80, 90],
        help="compute capabilities, 90 for 9.0 (80 90)",
    )
    parser.add_argument("--json", type=Path, help="also write the reports here")
    parser.add_argument(
        "--processes", type=int, default=2, help="how many compile at a time; 1: this one (2)"
    )
    parser.add_argument(
        "--into-cache", action="store_true", help="compile as launches do, into Triton's cache"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of --into-cache, at most")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    console, progress = Console(soft_wrap=True), Console(stderr=True)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    if triton.knobs.runtime.interpret:
        progress.print("TRITON_INTERPRET is set: kernels would be interpreted, not compiled")
        return 2
    started = time.perf_counter()
    try:
        modules = kernel_modules(options.modules)
        jobs = [
            Job(module, arch, index)
            for module in modules
            for arch in ([native_arch() or options.arch[0]] if options.into_cache else options.arch)
            for index in range(len(variants_of(importlib.import_module(module), arch)))
        ]
    except ModuleNotFoundError as error:
        progress.print(str(error))
        return 2
    if options.into_cache:
        said = warm_all(jobs, options.processes, options.seconds)
        console.print("\n".join(said), markup=False, highlight=False)
        console.print(f"{len(jobs)} variants, {time.perf_counter() - started:.0f} s")
        return int(bool(said))
    reports = run_all(jobs, options.processes, progress)
    missing = never_compiled(modules, options.arch[0])
    console.print(table(reports))
    console.print()
    for line in sums(reports):
        console.print(line, highlight=False)
    elapsed = time.perf_counter() - started
    console.print(f"triton {triton.__version__}, {elapsed:.0f} s", highlight=False)
    if options.json:
        content = {
            "triton": triton.__version__,
            "seconds": round(elapsed, 1),
            "variants": [asdict(report) for report in reports],
            "missing": missing,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    for report in reports:
        for text in [*report.faults, *(f"warning: {warning}" for warning in report.warnings)]:
            name = f"{report.module}.{report.kernel} ({report.variant}), sm_{report.arch}"
            console.print(f"{name}: {text}", markup=False, highlight=False)
    for text in missing:
        console.print(text, markup=False, highlight=False)
    return int(bool(missing or any(report.faults for report in reports)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
