"""Launch settings by measurement: writes this architecture's table (`kernels/triton/launching.py`).

Each entry of the table is exercised by a load that it is looked up for. One number at a time is
doubled or halved (stages: one more or less) for as long as that helps: a few dozen launches are
compiled per entry, not their hundreds of combinations. A candidate that does not compile, does not
fit, computes something else or is not clearly faster changes nothing. The table is written after
every entry.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import tempfile
import time as clock_time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import package_version
from benchmarks.gpu import pointwise, products
from benchmarks.gpu.paged import HeadShape, attend, make_paged
from benchmarks.gpu.setting import Setting, describe, has_faulted
from benchmarks.gpu.timing import Call, time_one
from rootlace.kernels.interface import KernelSet
from rootlace.kernels.triton import launching

Entry = dict[str, Any]
Table = dict[str, list[Entry]]
Time = Callable[[Call], float]
Load = Callable[..., Call]

GAIN = 0.98
"""A candidate must take less than this share of the best time so far."""
TOLERANCE = 2e-2


@dataclass(frozen=True)
class TuneCase:
    """A load: `make(kernels)` returns the call to time."""

    kernel: str
    key: dict[str, Any]
    what: str
    make: Callable[[KernelSet], Call]


@dataclass
class Tuned:
    """Result for an entry. Microseconds; entries that were tried, the first one included."""

    case: TuneCase
    before: float
    after: float
    tried: int = 1
    refused: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        what = f"{self.case.kernel:18} {self.case.what:44} {self.before:9.1f} -> {self.after:9.1f}"
        return f"{what} us, {self.tried} tried, {len(self.refused)} refused"


# ---------------------------------------------------------------- the search


def search(
    case: TuneCase, table: Table, kernels: KernelSet, time: Time, load: Load, most: float = math.inf
) -> Tuned:
    """Improve the entry of `table` that serves the case, in place, trying `most` others."""
    entry = entry_of(table, case)
    call = load(table, case, kernels)
    wanted = _kept(call())
    best = time(call)
    tuned = Tuned(case, before=best * 1e6, after=best * 1e6)
    seen, todo = [copy.deepcopy(entry)], neighbours(entry)
    while todo and len(seen) <= most:
        candidate, held = todo.pop(0), copy.deepcopy(entry)
        if candidate in seen:
            continue
        seen.append(candidate)
        entry.update(copy.deepcopy(candidate))
        seconds = math.inf
        try:
            call = load(table, case, kernels)
            if not all(map(alike, _kept(call()), wanted)):
                raise ValueError("another result")
            seconds = time(call)
        except Exception as error:
            if has_faulted():
                raise
            tuned.refused.append(f"{candidate}: {describe(error)}")
        if seconds < best * GAIN:
            best, todo = seconds, neighbours(entry)
        else:
            entry.update(held)
    tuned.after, tuned.tried = best * 1e6, len(seen)
    return tuned


def entry_of(table: Table, case: TuneCase) -> Entry:
    """Return the entry that is looked up for the case."""
    for entry in table[case.kernel]:
        if all(launching._holds(case.key, name, wanted) for name, wanted in entry["when"].items()):
            return entry
    raise KeyError(f"no entry of {case.kernel} for {case.key}")


def neighbours(entry: Entry) -> list[Entry]:
    """Yield copies of `entry` with one number changed."""
    found = []
    for name in (*entry["blocks"], "num_warps", "num_stages"):
        for larger in (True, False):
            changed = copy.deepcopy(entry)
            place = changed["blocks"] if name in changed["blocks"] else changed
            if name == "num_stages":
                place[name] += 1 if larger else -1
            else:
                place[name] = place[name] * 2 if larger else place[name] // 2
            if place[name] > 0:
                found.append(changed)
    return found


@contextmanager
def trial_tables(arch: int) -> Iterator[Load]:
    """Return a function that makes a case's call under a table. Kernels read tables from a
    temporary folder meanwhile, again for every candidate."""
    committed = launching.TABLES
    with tempfile.TemporaryDirectory() as name:
        launching.TABLES = Path(shutil.copytree(committed, Path(name) / "tables"))

        def load(table: Table, case: TuneCase, kernels: KernelSet) -> Call:
            write_table(launching.TABLES / f"sm_{arch}.json", None, table)
            launching.forget()
            return case.make(kernels)

        try:
            yield load
        finally:
            launching.TABLES = committed
            launching.forget()


def _kept(result: object) -> list[torch.Tensor]:
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part.clone() for part in parts if isinstance(part, torch.Tensor)]


def alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether results agree: integers exactly, others to `TOLERANCE` in norm; NaN never."""
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    found, wanted = found.double(), wanted.double()
    return bool((found - wanted).norm() <= TOLERANCE * wanted.norm())


# ---------------------------------------------------------------- the loads


def cases(device: torch.device, smoke: bool) -> Iterator[TuneCase]:
    yield from attention_cases(device, smoke)
    yield from pointwise_cases(device, smoke)
    yield from product_cases(device, smoke)


def attention_cases(device: torch.device, smoke: bool) -> Iterator[TuneCase]:
    """Yield cases with heads of 64, 128 and 256, bfloat16."""
    from rootlace.kernels.triton.decode_attention import tree_tile

    context, wide, few = (40, 3, 2) if smoke else (8192, 64, 8)
    for dim in (16,) if smoke else (128, 64, 256):
        shape = HeadShape(4, 2, dim) if smoke else HeadShape(32 if dim < 256 else 16, 8, dim)
        case = partial(_attention_case, shape, device)
        key: dict[str, Any] = {"head_dim": dim, "dtype": "bf16"}
        own = [(1, context + i % 8) for i in range(wide)]
        yield case("decode_attention", {**key, "fp8": False}, own)
        for rows in (wide, few):
            tile = tree_tile(rows, shape.heads // shape.kv_heads, dim, torch.bfloat16)
            under, prefix = [(1, context + 32)] * rows, context // 16 * 16
            yield case("tree_attention", {**key, "fp8": False, "tile": tile}, under, prefix)
        yield case("merge_attention", {"head_dim": dim}, [(1, 4 * context)] * few)
        yield case("extend_attention", {**key, "tile": "large"}, [(context, context)])
        yield case("extend_attention", {**key, "tile": "small"}, [(12, context)] * wide)


def _attention_case(
    shape: HeadShape,
    device: torch.device,
    kernel: str,
    key: dict[str, Any],
    rows: list[tuple[int, int]],
    prefix: int = 0,
) -> TuneCase:
    # Made as late as possible: all cases together would fill the memory.
    paged = cache(partial(make_paged, rows, shape, device, prefix=prefix))
    what = f"{len(rows)} rows of {rows[0]}, heads of {shape.head_dim}"
    return TuneCase(kernel, key, what, lambda kernels: attend(kernels, paged()))


POINTWISE = {
    # Kernel of the table -> case of the benchmark.
    "gated": "silu_mul",
    "embedding": "embedding",
    "copy_slots": "copy_slots",
    "rope_and_write": "rope_and_write, bf16 cache",
    "edit_logits": "edit_logits, mask and penalties",
    "pick_tokens": "pick_tokens, temperature 1",
    "token_logprobs": "token_logprobs",
}


def pointwise_cases(device: torch.device, smoke: bool) -> Iterator[TuneCase]:
    sizes = pointwise.SMOKE if smoke else pointwise.Sizes(tokens=(4096,))
    found = {case.name: case for case in pointwise.cases(sizes, device)}
    for kernel, name in POINTWISE.items():
        key = {"head_dim": sizes.head_dim} if kernel == "rope_and_write" else {}
        yield TuneCase(kernel, key, name, partial(partial, found[name].call))
    for width in (sizes.hidden,) if smoke else (1024, 2048, 4096, 8192):
        norms = pointwise.cases(replace(sizes, hidden=width), device)
        norm = next(case for case in norms if case.name == "add_rms_norm")
        what = f"add_rms_norm, {width} wide"
        yield TuneCase("rms_norm", {"width": width}, what, partial(partial, norm.call))


def product_cases(device: torch.device, smoke: bool) -> Iterator[TuneCase]:
    """Yield a decode step of 16 rows by int4 in groups, as in checkpoints, and by Q4_K's uint4,
    whose scales are integers with units."""
    outputs, inputs = (32, 256) if smoke else (4096, 4096)
    rows = torch.randn((16, inputs), device=device).to(torch.bfloat16)
    makers = products.weights_of(outputs, inputs, device)
    for what, units in (("int4 in groups of 128", False), ("uint4 with units", True)):
        make = partial(products.product, rows, makers[what]())
        key = {"dtype": "bf16", "units": units}
        yield TuneCase("quantised_linear", key, f"16 rows by {what}", make)


# ---------------------------------------------------------------- the table


def write_table(path: Path, measured: dict[str, str] | None, table: Table) -> None:
    """Write a table in the form of the committed ones: an entry a line."""
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
    most: float = math.inf,
) -> Iterator[Tuned]:
    """Search for every case and write the table to `path` after each."""
    table: Table = {}
    # An architecture's table may omit kernels; the default has all.
    for name in (launching.DEFAULT, f"sm_{arch}"):
        if (existing := launching.TABLES / f"{name}.json").exists():
            table |= json.loads(existing.read_text())["kernels"]
    with trial_tables(arch) as load:
        for case in found:
            yield search(case, table, kernels, time, load, most)
            write_table(path, measured, table)


def main(device: torch.device, smoke: bool, names: Sequence[str], budget: float) -> int:
    """Tune the named kernels (none: all) on `device` until `budget` seconds are over; with `smoke`,
    interpreted ones, one other entry each, without writing."""
    from rootlace.kernels.triton import TRITON
    from rootlace.kernels.triton.launching import architecture

    setting = Setting(device, smoke, quick=True)
    deadline = clock_time.monotonic() + budget
    found = [case for case in cases(device, smoke) if not names or case.kernel in names]
    unknown = set(names) - {case.kernel for case in found}
    if unknown:
        print(f"nothing is known to tune {', '.join(sorted(unknown))} with")
        return 2
    measured = {
        "gpu": torch.cuda.get_device_name(device) if setting.on_gpu else "none",
        "triton": package_version("triton") or "",
        "date": datetime.now(UTC).date().isoformat(),
    }

    def time(call: Call) -> float:
        return time_one(setting, call, capture=True).median

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        arch = architecture(device)
        path = (Path(folder) if smoke else launching.TABLES) / f"sm_{arch}.json"
        most = 1 if smoke else math.inf
        for number, tuned in enumerate(tune(TRITON, arch, found, time, path, measured, most), 1):
            print(tuned, flush=True)
            if number < len(found) and clock_time.monotonic() > deadline:
                print(f"{len(found) - number} of {len(found)} are left: no time")
                break
        if not smoke:
            print(f"written: {path}")
    return 0
