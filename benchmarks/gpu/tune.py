"""Launch settings by measurement: writes this architecture's table (`kernels/triton/tuning.py`).

Each entry of the table is exercised by a load that it is looked up for. One parameter after the
other is varied, the others held (coordinate descent): a few dozen launches are compiled per entry,
not their hundreds of combinations. A candidate that does not compile, does not fit, computes
something else or is not clearly faster changes nothing. The table is written after every entry.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import time as clock_time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import package_version
from benchmarks.gpu import pointwise
from benchmarks.gpu.paged import HeadShape, Paged, attend, make_paged
from benchmarks.gpu.setting import describe, has_faulted
from benchmarks.gpu.timing import Clock, Timing
from rootlace.kernels import KernelSet

Entry = dict[str, Any]
Table = dict[str, list[Entry]]
Call = Callable[[], object]
Time = Callable[[Call], float]

GAIN = 0.98
"""A candidate must take less than this share of the best time so far."""
ROUNDS = 2
REPEATS = 25
TOLERANCE = 2e-2

WARPS = (2, 4, 8, 16)


@dataclass(frozen=True)
class TuneCase:
    """A load: `make(kernels)` gives the call to time. `options` are the values tried of each block
    size, of num_warps and of num_stages."""

    kernel: str
    key: dict[str, Any]
    what: str
    make: Callable[[KernelSet], Call]
    options: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass
class Tuned:
    """What became of an entry. Microseconds."""

    case: TuneCase
    before: float
    after: float
    tried: int = 0
    refused: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- the search


def search(case: TuneCase, table: Table, kernels: KernelSet, time: Time, trial: Trial) -> Tuned:
    """Improve the entry of `table` that serves the case, in place."""
    entry = entry_of(table, case)
    call = trial.load(table, case, kernels)
    wanted = _kept(call())
    best = time(call)
    tuned = Tuned(case, before=best * 1e6, after=best * 1e6, tried=1)
    seen = {json.dumps(entry, sort_keys=True)}
    for _ in range(ROUNDS):
        improved = False
        for name, values in case.options.items():
            for value in values:
                candidate = with_value(entry, name, value)
                spelled = json.dumps(candidate, sort_keys=True)
                if spelled in seen:
                    continue
                seen.add(spelled)
                tuned.tried += 1
                before = copy.deepcopy(entry)
                entry.update(candidate)
                try:
                    call = trial.load(table, case, kernels)
                    if not alike(_kept(call()), wanted):
                        raise ValueError("another result")
                    seconds = time(call)
                except Exception as error:
                    if has_faulted():
                        raise
                    tuned.refused.append(f"{name} {value}: {describe(error)}")
                    seconds = float("inf")
                if seconds < best * GAIN:
                    best, improved = seconds, True
                else:
                    entry.update(before)
        if not improved:
            break
    tuned.after = best * 1e6
    return tuned


def entry_of(table: Table, case: TuneCase) -> Entry:
    """The entry that is looked up for the case."""
    from rootlace.kernels.triton import tuning

    for entry in table[case.kernel]:
        if all(tuning._holds(case.key, name, wanted) for name, wanted in entry["when"].items()):
            return entry
    raise KeyError(f"no entry of {case.kernel} for {case.key}")


def with_value(entry: Entry, name: str, value: int) -> Entry:
    """`entry` with one number changed: of a block, num_warps or num_stages."""
    changed = copy.deepcopy(entry)
    if name in ("num_warps", "num_stages"):
        changed[name] = value
    elif name in changed["blocks"]:
        changed["blocks"][name] = value
    else:
        raise KeyError(f"{name} is no parameter of {entry}")
    return changed


class Trial:
    """Tables in a folder of their own, read anew for every candidate."""

    def __init__(self, folder: Path, arch: int) -> None:
        self._folder, self._arch = folder, arch

    def load(self, table: Table, case: TuneCase, kernels: KernelSet) -> Call:
        """The case's call under `table`."""
        from rootlace.kernels.triton import tuning

        text = json.dumps({"measured": None, "kernels": table})
        (self._folder / f"sm_{self._arch}.json").write_text(text)
        tuning.forget()
        return case.make(kernels)


@contextmanager
def trial(arch: int) -> Iterator[Trial]:
    """Kernels read their tables from a temporary folder meanwhile."""
    from rootlace.kernels.triton import tuning

    committed = tuning.TABLES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in committed.glob("*.json"):
            shutil.copy(path, folder)
        tuning.TABLES = folder
        try:
            yield Trial(folder, arch)
        finally:
            tuning.TABLES = committed
            tuning.forget()


def _kept(result: object) -> list[torch.Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part.clone() for part in parts if isinstance(part, torch.Tensor)]


def alike(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Integers exactly, others to `TOLERANCE` in norm; NaN is like nothing."""
    for one, other in zip(found, wanted, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return False
        elif not bool((one.double() - other.double()).norm() <= TOLERANCE * other.double().norm()):
            return False
    return True


# ---------------------------------------------------------------- the loads


def cases(device: torch.device, smoke: bool) -> list[TuneCase]:
    return [*attention_cases(device, smoke), *pointwise_cases(device, smoke)]


def attention_cases(device: torch.device, smoke: bool) -> Iterator[TuneCase]:
    """Of heads of 64, 128 and 256, bfloat16."""
    for dim in (16,) if smoke else (128, 64, 256):
        shape = HeadShape(4, 2, dim) if smoke else HeadShape(32 if dim < 256 else 16, 8, dim)
        context, wide, few = (40, 3, 2) if smoke else (8192, 64, 8)
        key = {"head_dim": max(dim, 16), "dtype": "bf16", "fp8": False}
        own = [(1, context + i % 8) for i in range(wide)]
        yield TuneCase(
            "decode_attention",
            key,
            f"{wide} rows of {context}, heads of {dim}",
            _attends(own, shape, device),
            {"BLOCK_N": (16, 32, 64, 128), "num_stages": (1, 2, 3, 4, 5)}
            | {"num_warps": WARPS[:3], "PROGRAMS": (1, 2, 3, 4)},
        )
        for rows in (wide, few):
            yield TuneCase(
                "tree_attention",
                {**key, "tile": _tile(rows, shape)},
                f"{rows} rows under {context}, heads of {dim}",
                _attends([(1, context + 32)] * rows, shape, device, prefix=context // 16 * 16),
                {"BLOCK_N": (16, 32, 64, 128), "num_stages": (1, 2, 3, 4)}
                | {"num_warps": WARPS[:3], "PROGRAMS": (1, 2, 3)},
            )
        yield TuneCase(
            "merge_attention",
            {"head_dim": max(dim, 16)},
            f"{few} rows of {4 * context}, heads of {dim}",
            _attends([(1, 4 * context)] * few, shape, device),
            {"CHUNK": (4, 8, 16, 32), "num_warps": (1, 2, 4)},
        )
        chunks = {"large": [(context, context)], "small": [(12, context)] * wide}
        for tile, parts in chunks.items():
            yield TuneCase(
                "extend_attention",
                {"head_dim": dim, "dtype": "bf16", "tile": tile},
                f"{len(parts)} of {parts[0][0]} tokens behind {context}, heads of {dim}",
                _attends(parts, shape, device),
                {"BLOCK_N": (16, 32, 64, 128), "num_stages": (1, 2, 3, 4, 5)}
                | {"num_warps": WARPS[1:3], "BLOCK_M": (16, 32, 64, 128)},
            )


def _tile(rows: int, shape: HeadShape) -> int:
    from rootlace.kernels.triton.tree_attention import tree_tile

    return tree_tile(rows, shape.heads // shape.kv_heads, shape.head_dim, torch.bfloat16)


def _attends(
    rows: list[tuple[int, int]], shape: HeadShape, device: torch.device, prefix: int = 0
) -> Callable[[KernelSet], Call]:
    made: list[Paged] = []

    def make(kernels: KernelSet) -> Call:
        if not made:  # as late as possible: all cases together would fill the memory
            made.append(make_paged(rows, shape, device, prefix=prefix))
        return attend(kernels, made[0])

    return make


POINTWISE: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    # Kernel of the table -> case of the benchmark, and what is tried.
    "gated": ("silu_mul", {"BLOCK": (512, 1024, 2048, 4096), "num_warps": WARPS}),
    "embedding": ("embedding", {"BLOCK": (512, 1024, 2048, 4096), "num_warps": WARPS}),
    "copy_slots": ("copy_slots", {"BYTES": (1024, 2048, 4096), "num_warps": WARPS[:3]}),
    "rope_and_write": (
        "rope_and_write, bf16 cache",
        {"HEADS": (2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
    ),
    "edit_logits": (
        "edit_logits, mask and penalties",
        {"BLOCK": (1024, 2048, 4096, 8192), "num_warps": WARPS},
    ),
    "pick_tokens": (
        "pick_tokens, temperature 1",
        {"TILE": (2048, 4096, 8192), "num_warps": WARPS[1:]},
    ),
    "token_logprobs": ("token_logprobs", {"TILE": (2048, 4096, 8192), "num_warps": WARPS[1:]}),
}


def pointwise_cases(device: torch.device, smoke: bool) -> Iterator[TuneCase]:
    sizes = pointwise.SMOKE if smoke else pointwise.Sizes(tokens=(4096,))
    found = {case.name: case for case in pointwise.cases(sizes, device)}
    for kernel, (name, options) in POINTWISE.items():
        key = {"head_dim": max(sizes.head_dim, 16)} if kernel == "rope_and_write" else {}
        yield TuneCase(kernel, key, name, _calls(found[name]), options)
    for width in (64,) if smoke else (1024, 2048, 4096, 8192):
        x = torch.randn((3 if smoke else 4096, width), device=device).to(torch.bfloat16)
        weight = torch.ones(width, device=device, dtype=torch.bfloat16)
        yield TuneCase(
            "rms_norm",
            {"width": width},
            f"add_rms_norm, {width} wide",
            _norms(x, weight),
            {"num_warps": (1, 2, 4, 8, 16)},
        )


def _calls(case: pointwise.Case) -> Callable[[KernelSet], Call]:
    return lambda kernels: lambda: case.call(kernels)


def _norms(x: torch.Tensor, weight: torch.Tensor) -> Callable[[KernelSet], Call]:
    return lambda kernels: lambda: kernels.add_rms_norm(x, x, weight, 1e-5)


# ---------------------------------------------------------------- the table


def write_table(path: Path, measured: dict[str, str], table: Table) -> None:
    """As the committed ones are spelled: an entry a line."""
    kernels = []
    for name, entries in table.items():
        lines = ",\n".join(f"      {json.dumps(entry)}" for entry in entries)
        kernels.append(f"    {json.dumps(name)}: [\n{lines}\n    ]")
    body = ",\n".join(kernels)
    path.write_text(
        f'{{\n  "measured": {json.dumps(measured)},\n  "kernels": {{\n{body}\n  }}\n}}\n'
    )


def tune(
    kernels: KernelSet,
    arch: int,
    found: Sequence[TuneCase],
    time: Time,
    path: Path,
    measured: dict[str, str],
) -> Iterator[Tuned]:
    """Search for every case and write the table to `path` after each."""
    from rootlace.kernels.triton import tuning

    # An architecture's table may leave a kernel out: the default has them all.
    names = [tuning.DEFAULT, f"sm_{arch}"]
    paths = [tuning.TABLES / f"{name}.json" for name in names]
    table: Table = {}
    for existing in paths:
        if existing.exists():
            table |= json.loads(existing.read_text())["kernels"]
    with trial(arch) as folder:
        for case in found:
            yield search(case, table, kernels, time, folder)
            write_table(path, measured, table)


def main(device: torch.device, smoke: bool, names: Sequence[str], budget: float) -> int:
    """Tune the kernels named (none: all) on `device`, until `budget` seconds are spent; with
    `smoke`, interpreted ones, into the air."""
    import os

    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
    from rootlace.kernels.triton import TRITON, tuning
    from rootlace.kernels.triton.numerics import architecture

    arch = architecture(device)
    clock = Clock(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    measured = {
        "gpu": name,
        "triton": package_version("triton") or "",
        "date": datetime.now(UTC).date().isoformat(),
    }

    def time(call: Call) -> float:
        timing: Timing = clock.one(call, 1 if smoke else REPEATS, capture=device.type == "cuda")
        return timing.median

    start = clock_time.monotonic()
    path = tuning.TABLES / f"sm_{arch}.json"
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if smoke:
            path = Path(folder) / path.name
        found = cases(device, smoke)
        unknown = set(names) - {case.kernel for case in found}
        if unknown:
            print(f"nothing is known to tune {', '.join(sorted(unknown))} with")
            return 2
        if names:
            found = [case for case in found if case.kernel in names]
        if smoke:
            found = [_first_options(case) for case in found]
        for number, tuned in enumerate(tune(TRITON, arch, found, time, path, measured), 1):
            case = tuned.case
            print(
                f"{case.kernel:18} {case.what:44} {tuned.before:9.1f} -> {tuned.after:9.1f} us, "
                f"{tuned.tried} tried, {len(tuned.refused)} refused",
                flush=True,
            )
            if number < len(found) and clock_time.monotonic() - start > budget:
                print(f"{len(found) - number} of {len(found)} are left: no time")
                break
    if not smoke:
        print(f"written: {path}")
    return 0


def _first_options(case: TuneCase) -> TuneCase:
    """The case with one value of one parameter to try."""
    first = {name: values[:1] for name, values in list(case.options.items())[:1]}
    return TuneCase(case.kernel, case.key, case.what, case.make, first)
