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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import package_version
from benchmarks.gpu import pointwise
from benchmarks.gpu.paged import HeadShape, Paged, attend, make_paged
from benchmarks.gpu.setting import Setting, describe, has_faulted
from benchmarks.gpu.timing import time_one
from rootlace.kernels import KernelSet
from rootlace.kernels.triton import tuning

Entry = dict[str, Any]
Table = dict[str, list[Entry]]
Call = Callable[[], object]
Time = Callable[[Call], float]
Load = Callable[..., Call]

GAIN = 0.98
"""A candidate must take less than this share of the best time so far."""
ROUNDS = 2
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
    options: Mapping[str, Sequence[int]]

    def values(self) -> list[tuple[str, int]]:
        return [(name, value) for name, values in self.options.items() for value in values]

    def first(self) -> tuple[str, list[int]]:
        name, value = self.values()[0]
        return name, [value]


@dataclass
class Tuned:
    """What became of an entry. Microseconds; entries that were tried, the first one included."""

    case: TuneCase
    before: float
    after: float
    tried: int = 1
    refused: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- the search


def search(case: TuneCase, table: Table, kernels: KernelSet, time: Time, load: Load) -> Tuned:
    """Improve the entry of `table` that serves the case, in place."""
    entry = entry_of(table, case)
    call = load(table, case, kernels)
    wanted = _kept(call())
    best = time(call)
    tuned = Tuned(case, before=best * 1e6, after=best * 1e6)
    seen = [copy.deepcopy(entry)]
    for _ in range(ROUNDS):
        before = best
        for name, value in case.values():
            candidate = with_value(entry, name, value)
            if candidate in seen:
                continue
            seen.append(candidate)
            held = copy.deepcopy(entry)
            entry.update(candidate)
            seconds = float("inf")
            try:
                call = load(table, case, kernels)
                if not alike(_kept(call()), wanted):
                    raise ValueError("another result")
                seconds = time(call)
            except Exception as error:
                if has_faulted():
                    raise
                tuned.refused.append(f"{name} {value}: {describe(error)}")
            if seconds < best * GAIN:
                best = seconds
            else:
                entry.update(held)
        if best == before:
            break
    tuned.after, tuned.tried = best * 1e6, len(seen)
    return tuned


def entry_of(table: Table, case: TuneCase) -> Entry:
    """The entry that is looked up for the case."""
    for entry in table[case.kernel]:
        if all(tuning._holds(case.key, name, wanted) for name, wanted in entry["when"].items()):
            return entry
    raise KeyError(f"no entry of {case.kernel} for {case.key}")


def with_value(entry: Entry, name: str, value: int) -> Entry:
    """`entry` with one number changed: of a block, num_warps or num_stages."""
    changed = copy.deepcopy(entry)
    place = changed if name in ("num_warps", "num_stages") else changed["blocks"]
    if name not in place:
        raise KeyError(f"{name} is no parameter of {entry}")
    place[name] = value
    return changed


@contextmanager
def trial_tables(arch: int) -> Iterator[Load]:
    """What gives a case's call under a table. Kernels read their tables from a temporary folder
    meanwhile, anew for every candidate."""
    committed = tuning.TABLES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in committed.glob("*.json"):
            shutil.copy(path, folder)

        def load(table: Table, case: TuneCase, kernels: KernelSet) -> Call:
            text = json.dumps({"measured": None, "kernels": table})
            (folder / f"sm_{arch}.json").write_text(text)
            tuning.forget()
            return case.make(kernels)

        tuning.TABLES = folder
        try:
            yield load
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
    blocks = (16, 32, 64, 128)
    stages = (1, 2, 3, 4, 5)
    for dim in (16,) if smoke else (128, 64, 256):
        shape = HeadShape(4, 2, dim) if smoke else HeadShape(32 if dim < 256 else 16, 8, dim)
        context, wide, few = (40, 3, 2) if smoke else (8192, 64, 8)
        key: dict[str, Any] = {"head_dim": max(dim, 16), "dtype": "bf16", "fp8": False}

        def case(
            kernel: str,
            key: dict[str, Any],
            what: str,
            rows: list[tuple[int, int]],
            options: dict[str, tuple[int, ...]],
            prefix: int = 0,
            shape: HeadShape = shape,
        ) -> TuneCase:
            make = _attends(rows, shape, device, prefix)
            return TuneCase(kernel, key, f"{what}, heads of {shape.head_dim}", make, options)

        own = [(1, context + i % 8) for i in range(wide)]
        tried = {"BLOCK_N": blocks, "num_stages": stages, "num_warps": WARPS[:3]}
        split = {**tried, "PROGRAMS": (1, 2, 3, 4)}
        yield case("decode_attention", key, f"{wide} rows of {context}", own, split)
        for rows in (wide, few):
            under = [(1, context + 32)] * rows
            tiled = {**key, "tile": _tile(rows, shape)}
            what, prefix = f"{rows} rows under {context}", context // 16 * 16
            options = {**split, "num_stages": stages[:4], "PROGRAMS": (1, 2, 3)}
            yield case("tree_attention", tiled, what, under, options, prefix)
        long = [(1, 4 * context)] * few
        options = {"CHUNK": (4, 8, 16, 32), "num_warps": (1, 2, 4)}
        what = f"{few} rows of {4 * context}"
        yield case("merge_attention", {"head_dim": max(dim, 16)}, what, long, options)
        chunks = {"large": [(context, context)], "small": [(12, context)] * wide}
        for tile, parts in chunks.items():
            tiled = {"head_dim": dim, "dtype": "bf16", "tile": tile}
            what = f"{len(parts)} of {parts[0][0]} tokens behind {context}"
            options = {**tried, "num_warps": WARPS[1:3], "BLOCK_M": blocks}
            yield case("extend_attention", tiled, what, parts, options)


def _tile(rows: int, shape: HeadShape) -> int:
    from rootlace.kernels.triton.tree_attention import tree_tile

    return tree_tile(rows, shape.heads // shape.kv_heads, shape.head_dim, torch.bfloat16)


def _attends(
    rows: list[tuple[int, int]], shape: HeadShape, device: torch.device, prefix: int
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
        call = found[name].call
        yield TuneCase(kernel, key, name, partial(partial, call), options)
    for width in (64,) if smoke else (1024, 2048, 4096, 8192):
        x = torch.randn((3 if smoke else 4096, width), device=device).to(torch.bfloat16)
        norm = partial(_norm, x, torch.ones(width, device=device, dtype=torch.bfloat16))
        warps = {"num_warps": (1, 2, 4, 8, 16)}
        yield TuneCase("rms_norm", {"width": width}, f"add_rms_norm, {width} wide", norm, warps)


def _norm(x: torch.Tensor, weight: torch.Tensor, kernels: KernelSet) -> Call:
    return lambda: kernels.add_rms_norm(x, x, weight, 1e-5)


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
    # An architecture's table may leave a kernel out: the default has them all.
    names = [tuning.DEFAULT, f"sm_{arch}"]
    paths = [tuning.TABLES / f"{name}.json" for name in names]
    table: Table = {}
    for existing in paths:
        if existing.exists():
            table |= json.loads(existing.read_text())["kernels"]
    with trial_tables(arch) as load:
        for case in found:
            yield search(case, table, kernels, time, load)
            write_table(path, measured, table)


def main(device: torch.device, smoke: bool, names: Sequence[str], budget: float) -> int:
    """Tune the kernels named (none: all) on `device`, until `budget` seconds are spent; with
    `smoke`, interpreted ones, one value of one parameter each, into the air."""
    from rootlace.kernels.triton import TRITON
    from rootlace.kernels.triton.numerics import architecture

    arch = architecture(device)
    setting = Setting(device, smoke, quick=True)
    measured = {
        "gpu": torch.cuda.get_device_name(device) if setting.on_gpu else "none",
        "triton": package_version("triton") or "",
        "date": datetime.now(UTC).date().isoformat(),
    }
    deadline = clock_time.monotonic() + budget
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = (Path(folder) if smoke else tuning.TABLES) / f"sm_{arch}.json"
        found = cases(device, smoke)
        unknown = set(names) - {case.kernel for case in found}
        if unknown:
            print(f"nothing is known to tune {', '.join(sorted(unknown))} with")
            return 2
        found = [case for case in found if not names or case.kernel in names]
        if smoke:
            found = [replace(case, options=dict([case.first()])) for case in found]

        def time(call: Call) -> float:
            return time_one(setting, call, capture=True).median

        for number, tuned in enumerate(tune(TRITON, arch, found, time, path, measured), 1):
            case = tuned.case
            print(
                f"{case.kernel:18} {case.what:44} {tuned.before:9.1f} -> {tuned.after:9.1f} us, "
                f"{tuned.tried} tried, {len(tuned.refused)} refused",
                flush=True,
            )
            if number < len(found) and clock_time.monotonic() > deadline:
                print(f"{len(found) - number} of {len(found)} are left: no time")
                break
        if not smoke:
            print(f"written: {path}")
    return 0
