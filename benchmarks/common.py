"""Common parts of benchmarks: options; machine, date and versions; tables and progress bars."""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rootlace.kernels.native.build import read_processor
from rootlace.kernels.native.machine import usable_cores
from rootlace.runtime.doctor.report import ForeignLoad as ForeignLoad

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rootlace", "torch", "numpy", "transformers", "tokenizers", "pyzmq", "msgspec")


def environment(*packages: str) -> dict[str, Any]:
    """Return machine, versions, date and commit."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": read_processor().name,
            "cores": usable_cores(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": platform.system(),
            "architecture": platform.machine(),
        },
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in (*PACKAGES, *packages)},
    }


def commit() -> str:
    """Return the checkout's commit, with `+` if tracked files differ; "" outside of git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if head and _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def new_parser(benchmark: str, doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of all benchmarks. `doc`: the benchmark's docstring."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    return parser


class Report:
    """Results of a benchmark, with machine, date and options of the run; made before measuring."""

    def __init__(self, benchmark: str, arguments: argparse.Namespace, *packages: str) -> None:
        """`packages`: further packages whose versions matter."""
        self.found: dict[str, Any] = {"benchmark": benchmark, **environment(*packages)}
        # Paths of files do not matter for the measurement.
        self.found["options"] = {
            name: [one.name for one in given if isinstance(one, Path)] or given
            if isinstance(given, list)
            else given
            for name, given in vars(arguments).items()
            if given is not None and not isinstance(given, Path | dict)
        }
        self._path: Path | None = arguments.json
        self._foreign = ForeignLoad()

    def add(self, name: str, value: Any) -> None:
        """Add dataclasses, alone or in lists, as objects."""
        self.found[name] = msgspec.to_builtins(value)

    def foreign_line(self) -> str:
        """Record how many cores other programs kept busy so far; return that as a line."""
        self.found["foreign_cores"] = cores = self._foreign.cores()
        return f"other programs kept {cores:.2f} cores busy meanwhile"

    def write(self) -> None:
        """Write JSON: null for NaN, which means not measured, and plain numbers for numpy's."""
        if self._path is not None:
            _write_json(self._path, self.found)

    def write_part(self, name: str) -> None:
        """Write the part `name` of the file; keep its other parts."""
        if self._path is not None:
            whole: dict[str, Any] = {}
            if self._path.exists():
                whole = msgspec.json.decode(self._path.read_bytes())
            _write_json(self._path, {**whole, name: self.found})


def _write_json(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.encode(found, enc_hook=float)
    path.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def aim(value: float | None, sign: str, bound: float, unit: str = "") -> dict[str, Any]:
    """Return {target, value, met}: the aim (`sign` is >=, <= or <) and the result; value and met
    are None if not measured."""
    target = f"{sign} {bound:.4g}{unit}"
    if value is None or not math.isfinite(value):
        return {"target": target, "value": None, "met": None}
    met = {">=": value >= bound, "<=": value <= bound, "<": value < bound}[sign]
    return {"target": target, "value": value, "met": met}


def console_of(width: int) -> Console:
    """Return a console with lines of `width` for output to a file."""
    console = Console()
    if not console.is_terminal:
        console.width = width
    return console


def table_of(title: str, rows: Mapping[str, Any], columns: Mapping[str, str]) -> Table:
    """Return a table with a row per name and a column per figure; failed rows have their error."""
    table = new_table(title, "", *columns)
    for name, row in rows.items():
        cells = [row["error"]] if "error" in row else [c.format(**row) for c in columns.values()]
        table.add_row(name, *cells)
    return table


def new_table(title: str, *columns: str) -> Table:
    """Return a table of numbers with a name in the first column, for a width of 80 columns."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def progress_bar(console: Console) -> Progress:
    """Return a bar that disappears at the end. It is drawn once a second, since drawing takes time
    from the measurement."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=1
    )


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile (0 to 1) by linear interpolation; nan of no values."""
    return float(np.quantile(values, q)) if len(values) else math.nan
