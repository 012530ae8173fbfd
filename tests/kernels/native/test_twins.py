"""Kernels for each set of vector instructions against its twin in plain C++: the same bits.

ARM's are compiled by a cross compiler and run by an emulator; the twin's results are compared with
float64.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rootlace.kernels.native.build import (
    FLAGS,
    INSTRUCTION_SETS,
    SOURCES,
    user_cache,
    write_whole,
)
from rootlace.kernels.native.linear import DTYPES, Epilogue, prepared, scheme_of
from rootlace.kernels.reference.layers import dequantise
from tests.conftest import ROOT
from tests.kernels.cases import AttentionCase, exact_attention, make_attention
from tests.kernels.native.layouts import laid_out
from tests.kernels.quantised_cases import (
    FORMS,
    integer_product,
    integers_are_multiplied,
    make,
)
from tests.native import library_for, skip_where_it_cannot_run

HOST, CROSS, EMULATOR = "g++", "aarch64-linux-gnu-g++", "qemu-aarch64-static"
WITH_VECTORS = ("linear", "pack_codes", "attention", "prepare")
WITHOUT_VECTORS = ("attention_plan", "runs", "team")
"""Sources that do not depend on the set: all programs of a compiler share their objects."""
DRIVER = Path(__file__).with_name("driver.cpp")
QUICK = ("-O1", "-fexpensive-optimizations", "-fno-tree-loop-optimize")
"""Flags for code that only these tests run: faster to compile than -O3, with the same bits.

-O1 alone would add products with two roundings. (The shared library has -O3, as every user's.)
"""
UNROLLED = re.compile(rb"^ *#pragma GCC unroll .*$", re.MULTILINE)
LINEAR, ATTENTION, CODES = 0, 1, 2
EPS = {torch.float32: 2e-7, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Case:
    name: str
    """Name of the instruction set, as from `rl_instructions`."""
    twin: str
    compiler: str
    flags: tuple[str, ...]
    runner: tuple[str, ...] = ()
    shared: bool = False
    """Whether other tests compile the library for these flags: then it is taken."""


X86 = {one.name: one.target for one in INSTRUCTION_SETS["x86_64"]}
CASES = (
    Case("neon", "NeonTwin", CROSS, ("-march=armv8-a", "-static"), (EMULATOR,)),
    Case(
        *("neon-bf16", "NeonBf16Twin", CROSS, ("-march=armv8.2-a+bf16+dotprod", "-static")),
        runner=(EMULATOR, "-cpu", "max"),
    ),
    Case("avx2", "Avx2Twin", HOST, X86["avx2"], shared=True),
    Case("avx512", "Avx512Twin", HOST, X86["avx512"]),
    Case("avx512-bf16", "Avx512Bf16Twin", HOST, X86["avx512-bf16"]),
)


@dataclass(frozen=True)
class Record:
    """Input of the driver, and the expected output (or None if unknown)."""

    data: bytes
    dtype: torch.dtype
    expected: Tensor
    allowed: Tensor | float


def built(compiler: str, *flags: str, library: str = "") -> str:
    """Build the driver's program, with kernels of its own or those of a library."""
    if library:
        return made(compiler, *FLAGS, *flags, str(DRIVER), library)
    common = [part for part in flags if part == "-static"]
    without_vectors = [
        made(compiler, *FLAGS, *QUICK, "-c", str(not_unrolled() / f"{name}.cpp"))
        for name in WITHOUT_VECTORS
    ]
    with_vectors = [
        made(compiler, *FLAGS, *QUICK, *flags, "-c", str(path))
        for path in (DRIVER, *(not_unrolled() / f"{name}.cpp" for name in WITH_VECTORS))
    ]
    return made(compiler, *FLAGS, *common, *with_vectors, *without_vectors)


def made(*command: str) -> str:
    """Return the compiler's output file; the user's cache keeps it for all checkouts with the same
    input."""
    made_of = [" ".join(command).replace(str(ROOT), "").encode(), compiler_version(command[0])]
    made_of += [path.read_bytes() for path in (DRIVER, *sorted(SOURCES.rglob("*.*")))]
    digest = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    path = user_cache() / "twins" / f"{digest}{'.o' if '-c' in command else ''}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{os.getpid()}-{path.name}")
        done = subprocess.run(
            [*command, f"-I{not_unrolled()}", "-o", str(unfinished)],
            capture_output=True,
            text=True,
            timeout=3600,
        )
        assert done.returncode == 0, done.stderr[:2000]
        unfinished.rename(path)
    return str(path)


@functools.cache
def not_unrolled() -> Path:
    """A copy of the sources in which loops stay loops: two thirds of the time to compile. Each file
    is there at once: another process may be compiling it."""
    copy = ROOT / "build" / "twins" / "sources"
    for path in SOURCES.rglob("*.*"):
        to = copy / path.relative_to(SOURCES)
        to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(to, UNROLLED.sub(b"", path.read_bytes()))
    return copy


@functools.cache
def compiler_version(compiler: str) -> bytes:
    """Return the compiler's version, with the processor that `-march=native` selects."""
    asked = [[compiler, "--version"], [compiler, "-march=native", "-Q", "--help=target"]]
    return b"".join(subprocess.run(one, capture_output=True).stdout for one in asked)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return numbers of all sizes: rounding of sums shows where small numbers meet large ones."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    return (numbers * torch.exp(2 * torch.randn(shape, generator=generator))).to(dtype)


def written(*parts: int | Tensor | np.ndarray) -> bytes:
    """Write integers as int32, and arrays as they lie in memory."""
    return b"".join(
        np.int32(part).tobytes()
        if isinstance(part, int)
        else part.contiguous().view(torch.uint8).numpy().tobytes()
        if isinstance(part, Tensor)
        else part.tobytes()
        for part in parts
    )


def products() -> Iterator[Record]:
    """Every number of rows that a tile has, odd depths, parts of panels, several stretches."""
    for dtype, kind in DTYPES.items():
        for outputs, inputs in ((6, 7), (48, 8), (50, 133), (96, 1100)):
            for rows in (1, 2, 3, 4, 5, 6, 8, 13):
                for epilogue in (Epilogue.STORE, Epilogue.ADD, Epilogue.SILU_MUL):
                    yield product(dtype, kind, outputs, inputs, rows, epilogue)


def product(
    dtype: torch.dtype, kind: int, outputs: int, inputs: int, rows: int, epilogue: Epilogue
) -> Record:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, seed=3)
    gated = epilogue == Epilogue.SILU_MUL
    own = torch.float32 if epilogue == Epilogue.ADD else dtype
    out = random(rows, outputs // 2 if gated else outputs, dtype=own, seed=2)
    head = (LINEAR, kind, int(epilogue), rows, outputs, inputs, out.nbytes)
    expected = x.double() @ weight.double().T + bias
    allowed = 1e-5 * (x.double().abs() @ weight.double().abs().T + bias.abs())
    if epilogue == Epilogue.ADD:
        expected, allowed = expected + out, allowed + 1e-6 * out.abs()
    if gated:
        gate, up = expected.chunk(2, -1)
        gate_allowed, up_allowed = allowed.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        # |silu'| <= 1.1, |silu(x)| <= |x|.
        allowed = 1.1 * gate_allowed * up.abs() + gate.abs() * up_allowed
    return Record(written(*head, x, weight, bias, out), own, expected, allowed)


def quantised(instructions: str) -> Iterator[Record]:
    """Every form of codes and scales, few rows and many."""
    for dtype, kind in DTYPES.items():
        for form in FORMS:
            if form[0].group == 8:
                continue
            weight = prepared(make(form, 50, 160))
            parts = [weight.values, weight.scales, weight.offsets, weight.units]
            parts.append(weight.offset_units)
            found = [part.contiguous().view(torch.uint8) for part in parts if part is not None]
            sizes = [0 if part is None else part.nbytes for part in parts]
            scheme = np.frombuffer(bytes(scheme_of(weight)), np.uint8)
            matrix = dequantise(weight).to(dtype).double()
            integers = integers_are_multiplied(instructions, weight, dtype)
            for rows in (1, 9):
                x = random(rows, 160, dtype=dtype)
                head = (CODES, kind, rows, 50, 160, *sizes, rows * 50 * dtype.itemsize)
                expected = x.double() @ matrix.T
                allowed = 1e-5 * (x.double().abs() @ matrix.abs().T)
                if integers:
                    expected = integer_product(x, weight).to(dtype).double()
                    allowed = torch.zeros_like(expected)
                yield Record(written(*head, scheme, *found, x), dtype, expected, allowed)


def attentions() -> Iterator[Record]:
    """Panels in the cache and plain rows; decode and extends; a window."""
    rows = ((1, 9), (5, 12), (1, 65), (16, 16), (2, 64), (3, 300), (1, 1026))
    for dtype, kind in DTYPES.items():
        for heads, dim, size, window in (
            ((4, 2), 32, 16, None),
            ((6, 1), 80, 16, 70),
            ((2, 2), 6, 5, None),
            ((3, 1), 24, 4, None),
        ):
            case = AttentionCase(rows, size, heads, dim, dtype, window=window, scale=0.125)
            tensors = make_attention(case, torch.device("cpu"))
            batch = tensors.batch
            tables = batch.block_tables.astype(np.int32)
            head = (ATTENTION, kind, *heads, dim, size, len(rows), tables.shape[1])
            data = written(
                *(*head, len(tensors.k_cache), window or 0),
                *(batch.row_start.astype(np.int32), batch.context_len.astype(np.int32), tables),
                tensors.q,
                *laid_out(tensors.k_cache, tensors.v_cache),
            )
            expected = exact_attention(tensors)[0]
            yield Record(data, dtype, expected, EPS[dtype] * 20 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # compiling may take two minutes where nothing else runs
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_set_computes_what_its_twin_does(case: Case, tmp_path: Path) -> None:
    for program in (HOST, case.compiler, *case.runner[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("twins are compared on x86-64")
    target = " ".join(case.flags)
    if not case.runner:
        skip_where_it_cannot_run(target)
    library = library_for(target)._name if case.shared else ""
    own = [*case.runner, built(case.compiler, *case.flags, library=library)]
    twin = built(HOST, "-march=native", f"-DROOTLACE_VECTORS={case.twin}")
    records = [*products(), *quantised(case.name), *attentions()]
    source, out = tmp_path / "input", tmp_path / "output"
    source.write_bytes(b"".join(record.data for record in records))

    def outputs(*command: str) -> tuple[str, bytes]:
        done = subprocess.run(
            [*command, str(source), str(out)], capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stderr[:2000]
        return done.stdout.strip(), out.read_bytes()

    name, found = outputs(*own)
    assert name == case.name
    name, expected = outputs(twin)
    assert name == f"{case.name}-twin"
    assert len(found) == len(expected)
    at = 0
    for record in records:
        size = record.expected.numel() * record.dtype.itemsize
        bits = expected[at : at + size]
        assert found[at : at + size] == bits
        numbers = torch.frombuffer(bytearray(bits), dtype=record.dtype).double()
        wrong = (numbers.view(record.expected.shape) - record.expected).abs() - record.allowed
        assert float((wrong - EPS[record.dtype] * record.expected.abs()).max()) <= 0
        at += size
    assert at == len(found)
