"""Compile `src/*.cpp` into a shared library for this machine, once.

The library's name in the user's cache folder is made of all inputs: sources, flags, processor and
compiler. Processes may build it at the same time: each links a file of its own and renames the file
into place.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

# Processor ----------------------------------------------------------------------------------------
#
# Instruction sets that kernels support, and the sets that this processor has.


ROOT = Path(os.sep)


class InstructionSet(msgspec.Struct, frozen=True):
    """Instruction set of a processor. `name` is that of `rl_instructions`, `flags` those of
    /proc/cpuinfo. `target`: the compiler's flags for exactly this set."""

    name: str
    flags: frozenset[str]
    target: tuple[str, ...]


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BFLOAT16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_TILES = _BFLOAT16 | {"amx_tile", "amx_bf16", "amx_int8"}
_VECTORS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_X86 = (
    InstructionSet("amx", _TILES, (*_VECTORS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    InstructionSet("avx512-bf16", _BFLOAT16, _VECTORS),
    InstructionSet("avx512", _V4, ("-march=x86-64-v4",)),
    InstructionSet("avx2", _V3, ("-march=x86-64-v3",)),
    InstructionSet("generic", frozenset(), ("-march=x86-64",)),
)
_NEON = frozenset({"asimd"})
_ARM = (
    InstructionSet("neon-bf16", _NEON | {"bf16", "asimddp"}, ("-march=armv8.2-a+bf16+dotprod",)),
    InstructionSet("neon", _NEON, ("-march=armv8-a",)),
)
INSTRUCTION_SETS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""Instruction sets by `platform.machine()`, the best first."""


class Processor(msgspec.Struct, frozen=True):
    """Processor with its instruction sets, the best first: `has` the reported ones, `lacks` the
    others. Without a report from the system (`known`), `lacks` are the sets that may be missing."""

    name: str
    architecture: str
    has: tuple[InstructionSet, ...]
    lacks: tuple[InstructionSet, ...]
    known: bool = True


def read_processor(root: Path = ROOT, architecture: str = "") -> Processor:
    """Read the processor from /proc/cpuinfo below `root`. `architecture`: "" is this machine's."""
    entries = first_processor(root)
    # ARM calls them features.
    flags = set((entries.get("flags") or entries.get("Features") or "").split())
    architecture = architecture or platform.machine()
    known = INSTRUCTION_SETS.get(architecture, ())
    return Processor(
        entries.get("model name") or platform.processor() or architecture,
        architecture,
        tuple(one for one in known if one.flags <= flags),
        tuple(one for one in known if not one.flags <= flags),
        bool(flags),
    )


def kind_of_processor() -> str:
    """Describe this machine's processor and its instruction sets."""
    entries = first_processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(entries[name] for name in wanted if name in entries) or platform.processor()


def first_processor(root: Path = ROOT) -> dict[str, str]:
    """Return the first processor's fields of /proc/cpuinfo below `root`; {} if there are none."""
    try:
        text = (root / "proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


# Prebuilt -----------------------------------------------------------------------------------------
#
# Prebuilt libraries of a wheel, one for each instruction set of its architecture.
#
# One library that chooses inside would fail: the linker keeps one copy of each instantiated
# template of the standard library, and that copy might have the best set's instructions. Two
# libraries loaded by one process share nothing: all symbols but their interface are hidden.


FOLDER = Path(__file__).parent / "prebuilt"
"""Folder of the prebuilt libraries; a checkout has none."""


def prebuilt_library(
    processor: Processor, without: Collection[str] = (), folder: Path = FOLDER
) -> Path | None:
    """Return the best prebuilt library for `processor`, `without` the named instruction sets; None
    if there is none."""
    for instructions in processor.has:
        path = folder / f"{instructions.name}.so"
        if instructions.name not in without and path.is_file():
            return path
    return None


# Whole file ---------------------------------------------------------------------------------------
#
# Files that appear whole or not at all, even if the process is killed.


UNFINISHED = "new-"
"""Prefix of the names of unfinished files, including those of killed processes."""


def write_whole(path: Path, content: bytes) -> None:
    """Write `path` in an existing folder. Raises OSError, and then leaves the old file in place."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as new:
        try:
            new.write(content)
            new.flush()
            os.fsync(new.fileno())  # the name must not reach the disk before the content
            Path(new.name).rename(path)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise


# Build --------------------------------------------------------------------------------------------


SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",  # otherwise two libraries in one process would share tables
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-fno-schedule-insns",  # otherwise GCC for ARM loads far ahead and spills sums to memory
)
NATIVE = (("-march=native",), ("-mcpu=native",), ())
"""Compiler flags for all of this processor's features; a compiler's first supported one is used."""
COMPILE_SECONDS = 3600.0
"""Seconds until a compiler counts as hanging; one minute is usual on two cores."""
KEPT_SECONDS = 30 * 24 * 3600
"""Seconds for which the cache folder keeps unused files."""
SHOWN_CHARACTERS = 4000

Report = Callable[[str], None]

log = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """Error for native kernels that cannot be compiled or loaded here, with the reason."""


class Compiler(msgspec.Struct, frozen=True):
    path: str
    program: str
    """File that `path` resolves to."""
    version: str
    target: tuple[str, ...]
    """Flags that select the processor."""


def user_cache() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/rootlace`, by default in ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else _home() / ".cache") / "rootlace"


def default_cache() -> Path:
    """Return the folder of the compiled libraries."""
    return user_cache() / "native"


def _home() -> Path:
    """Return the user's home; the root folder for a user without one, as in many containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.sep)


@contextmanager
def library_file(
    cache: Path | None = None,
    compilers: Sequence[str] = COMPILERS,
    target: Sequence[str] | None = None,
    report: Report | None = None,
    sources: Path = SOURCES,
    prebuilt: Path | None = None,
) -> Iterator[Path]:
    """Yield the library's path, valid in the `with` block: from `cache`, `prebuilt`, or compiled
    now.

    `target` replaces the flags that select this processor. `report` is called before a compilation.
    An earlier compiled library serves without a compiler. Raises `NativeUnavailable` with the
    compilers' messages if all fail.
    """
    common = _common_digest(sources, target)
    faults = []
    tried = set()
    folder = cache or default_cache()
    made_before = sorted(filter(_is_ours, _listed(folder, f"{common}-*.so")))
    ready = made_before[0] if made_before else prebuilt
    with ExitStack() as stack:
        for name in compilers:
            compiler = find_compiler(name, target)
            if compiler is None or compiler.program in tried:
                continue
            tried.add(compiler.program)
            path = folder / f"{common}-{_digest([compiler.version, *compiler.target])}.so"
            try:
                if not _is_ours(path):
                    take = ready if prebuilt else None
                    path = take or _made(path, compiler, sources, report, stack)
            except NativeUnavailable as fault:
                faults.append(str(fault))
                continue
            if path.parent == folder:
                # A library's modification time records its last use: many systems record no access
                # times.
                with suppress(OSError):  # another user's file, or a folder that cannot be written
                    os.utime(path)
            yield path
            return
        if ready:
            yield ready
            return
    if not faults:
        raise NativeUnavailable(f"no C++ compiler was found ({', '.join(compilers)})")
    raise NativeUnavailable("\n".join(faults))


def find_compiler(name: str, target: Sequence[str] | None = None) -> Compiler | None:
    """Return the compiler `name` if it exists and runs."""
    path = shutil.which(name)
    return None if path is None else _compiler(path, None if target is None else tuple(target))


@functools.cache
def _compiler(path: str, target: tuple[str, ...] | None) -> Compiler | None:
    """Probe a compiler, cached: the two runs take a tenth of a second, and a start probes
    repeatedly."""
    version = _output([path, "--version"])
    if version is None:
        return None
    for flags in NATIVE if target is None else (target,):
        probe = [path, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
        if target is not None or _output(probe) is not None:
            return Compiler(path, os.path.realpath(path), version, tuple(flags))
    return Compiler(path, os.path.realpath(path), version, ())


def _made(
    path: Path, compiler: Compiler, sources: Path, report: Report | None, stack: ExitStack
) -> Path:
    """Compile to `path`; if it is not writable, to a folder that `stack` removes."""
    if report is not None:
        report("compiling native kernels")
    started = time.monotonic()
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rootlace-")))
    library = work / "native.so"
    compile_library(compiler, sources, work, library)
    log.info("native kernels compiled by %s in %.1f s", compiler.path, time.monotonic() - started)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, library.read_bytes())
        _remove_unused(path.parent)
    except OSError as error:
        log.warning("native kernels are compiled at every start: %s: %s", path.parent, error)
        return library
    return path


def _remove_unused(folder: Path) -> None:
    """Remove former versions' libraries and killed processes' files. A process that has loaded a
    library keeps using it."""
    now = time.time()
    for path in (*_listed(folder, "*.so"), *_listed(folder, f"{UNFINISHED}*")):
        with suppress(OSError):  # another process was faster
            if now - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()


def compile_library(
    compiler: Compiler, sources: Path, work: Path, library: Path, link: Sequence[str] = ()
) -> None:
    """Compile each source in its own process, then link the objects, with these flags too. Objects
    are left in `work`. Raises `NativeUnavailable`."""
    flags = [*FLAGS, *compiler.target]
    parts = _files(sources, ".cpp")
    objects = [work / f"{part.stem}.o" for part in parts]
    _run_all(
        [compiler.path, *flags, "-c", str(part), "-o", str(made)]
        for part, made in zip(parts, objects, strict=True)
    )
    _run_all([[compiler.path, *flags, "-shared", *link, *map(str, objects), "-o", str(library)]])


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run the commands, one per core at a time, since each takes much memory. If one fails, stops
    the others and raises `NativeUnavailable`."""
    until = time.monotonic() + COMPILE_SECONDS

    def run(command: list[str]) -> None:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(until - time.monotonic(), 0),
        )
        if done.returncode:
            output = done.stdout.strip()[:SHOWN_CHARACTERS] or f"exit status {done.returncode}"
            raise NativeUnavailable(f"{' '.join(command)}: {output}")

    with ThreadPoolExecutor(_cores()) as pool:
        try:
            for running in [pool.submit(run, command) for command in commands]:
                running.result()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeUnavailable(f"the compiler does not work: {error}") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _output(command: list[str]) -> str | None:
    """Return the output of a command; None if the command cannot be run or fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _files(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def _common_digest(sources: Path, target: Sequence[str] | None) -> str:
    """Return a digest of all that a library depends on, except the compiler."""
    texts = [f"{path.name}\n{path.read_text('utf-8')}" for path in _files(sources, ".cpp", ".h")]
    flags = [*FLAGS, "native" if target is None else " ".join(target)]
    return _digest([*texts, *flags, platform.machine(), kind_of_processor()])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_ours(path: Path) -> bool:
    """Return whether the file is this user's; other users' files are not loaded."""
    try:
        return path.stat().st_uid in (os.getuid(), 0)
    except OSError:
        return False


def _listed(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []
