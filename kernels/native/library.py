"""`src/api.h` in ctypes: structures, and functions that check nothing but raise `NativeError`.

Calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from rootlace.kernels.native.build import (
    SOURCES,
    NativeUnavailable,
    library_file,
    prebuilt_library,
    read_processor,
)

# Errors -------------------------------------------------------------------------------------------
#
# Errors of calls of the native kernels. The caller and the team can continue after an error.


class NativeError(RuntimeError):
    """Error for a call that a C++ exception ended; its output is undefined."""


class NativeOutOfMemory(NativeError, MemoryError):
    """Error for a call without memory for its own buffers."""


# Handles ------------------------------------------------------------------------------------------
#
# Objects of the library, freed with the Python object that owns them.


class Team:
    """Team of computing threads, including the calling thread; see `src/team.h`."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.handle: int = library.rl_team_new(threads)
        _free_with(self, library.rl_team_free, self.handle)


class Workspace:
    """Buffers that the forward pass of one model keeps between steps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.handle: int = library.rl_workspace_new()
        _free_with(self, library.rl_workspace_free, self.handle)


def _free_with(holder: object, free: Callable[[int], None], handle: int) -> None:
    # Not at the interpreter's exit: a daemon thread may be inside a call.
    weakref.finalize(holder, free, handle).atexit = False


# Library ------------------------------------------------------------------------------------------


FLOAT32, BFLOAT16 = 0, 1
SEEK_RUNS = -1
"""Value of `Rows.num_runs` that makes C++ find the rows with blocks in common."""
LANES = 16
"""Numbers in a vector of `src/isa/vector.h`, on every processor."""

log = logging.getLogger(__name__)

# Declarations -------------------------------------------------------------------------------------
#
# C++ headers declare structures and functions; this section parses the headers.


HEADERS = ("api.h", "linear.h", "attention.h")
"""Headers that declare the structures and functions."""
NUMBERS = frozenset({"rl_prepare", "rl_team_size"})
"""Functions whose int32 result is a number, not a status."""
CHECKED = frozenset({"rl_forward", "rl_logits"})
"""Functions of each step: the caller raises `failure` for a status other than 0."""

_DECLARED = re.sub(r"//.*", "", "".join((SOURCES / name).read_text("utf-8") for name in HEADERS))
_TYPES = {"int32_t": c_int32, "int64_t": c_int64, "float": c_float, "void": None}


class Status(c_int32):
    """Result of a function that may fail: `declare` makes ctypes raise its error."""


class Created(c_void_p):
    """Handle made by a function; null if memory ran out."""


def _type(kind: str, pointer: str = "") -> Any:
    """Return the ctypes type of a C type: RlX is the structure X of this module; pointers are
    addresses."""
    structure = globals().get(kind.removeprefix("Rl")) if kind.startswith("Rl") else None
    if pointer:
        return c_void_p if structure is None else POINTER(structure)
    return structure or _TYPES[kind]


def _parameters(declared: str) -> list[Any]:
    """Return the types of a function's parameters; arrays and structures are addresses."""
    each = declared.split(",") if declared.strip() else ()
    return [c_void_p if "*" in one else _type(one.split()[0]) for one in each]


def _fields(name: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure."""
    found: list[tuple[str, Any]] = []
    body = re.search(rf"struct {name} {{(.*?)}};", _DECLARED, re.DOTALL)
    assert body is not None, name
    for declared in body[1].split(";")[:-1]:
        [[kind, names]] = re.findall(r"^\s*(?:const )?(\w+)(.*)", declared, re.DOTALL)
        if function := re.fullmatch(r" \(\*(\w+)\)\((.*)\)", names):
            found.append((function[1], ctypes.CFUNCTYPE(_type(kind), *_parameters(function[2]))))
            continue
        for each in names.split(","):
            [[pointer, field, count]] = re.findall(r"^\s*(\*?)\s*(\w+)(?:\[(\d+)\])?", each)
            of_one = _type(kind, pointer)
            found.append((field, of_one * int(count) if count else of_one))
    return found


class Scheme(ctypes.Structure):
    _fields_ = _fields("RlScheme")


class Source(ctypes.Structure):
    _fields_ = _fields("RlSource")


class Linear(ctypes.Structure):
    _fields_ = _fields("RlLinear")


class Norm(ctypes.Structure):
    _fields_ = _fields("RlNorm")


class Expert(ctypes.Structure):
    _fields_ = _fields("RlExpert")


class Layer(ctypes.Structure):
    _fields_ = _fields("RlLayer")


class Mixture(ctypes.Structure):
    _fields_ = _fields("RlMixture")


class Latent(ctypes.Structure):
    _fields_ = _fields("RlLatent")


class LowRank(ctypes.Structure):
    _fields_ = _fields("RlLowRank")


class Model(ctypes.Structure):
    _fields_ = _fields("RlModel")


Sum = dict(Model._fields_)["sum"]
"""Callback (address, count of float32) that sums over processes -> 0, or a fault."""


class Rows(ctypes.Structure):
    _fields_ = _fields("RlRows")


class Step(ctypes.Structure):
    _fields_ = _fields("RlStep")


class Edits(ctypes.Structure):
    _fields_ = _fields("RlEdits")


STRUCTURES = (
    *(Scheme, Source, Linear, Norm, Expert, Layer, Mixture, Latent, LowRank, Model),
    *(Rows, Step, Edits),
)


def _functions() -> Iterator[tuple[str, tuple[Any, list[Any]]]]:
    """Yield each function's name, with its result and parameters."""
    declared = r"RL_API (?:const )?(\w+)(\*?)\s+(rl_\w+)\(([^)]*)\);"
    for kind, pointer, name, parameters in re.findall(declared, _DECLARED):
        result: Any = c_char_p if kind == "char" else Created
        if not pointer:
            result = _type(kind)
        if result is c_int32 and name not in NUMBERS | CHECKED:
            result = Status
        yield name, (result, _parameters(parameters))


FUNCTIONS = dict(_functions())


# Loading ------------------------------------------------------------------------------------------


INSTRUCTIONS: dict[str, tuple[str, ...] | None] = {
    "best": None,
    "no-tiles": ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"),
}
"""Compiler flags of a library's target: this processor, or a lesser instruction set."""


class InstructionsRefused(NativeUnavailable):
    """Error for instructions of the library that the operating system denies to this process."""


NO_MEMORY = 1
"""`RL_NO_MEMORY` of api.h."""


def declare(library: ctypes.CDLL, name: str) -> None:
    """Declare the types of the function `name`, and let it raise `NativeError` on failure."""
    function = getattr(library, name)
    result, function.argtypes = FUNCTIONS[name]
    if result is Status:
        function.restype = c_int32
        function.errcheck = functools.partial(_done, library)
    elif result is Created:
        function.restype = c_void_p
        function.errcheck = functools.partial(_created, library)
    else:
        function.restype = result


def failure(library: ctypes.CDLL, status: int) -> NativeError:
    """Return the error of a call's status other than 0."""
    kind = NativeOutOfMemory if status == NO_MEMORY else NativeError
    return kind(library.rl_error().decode(errors="replace"))


def _done(library: ctypes.CDLL, status: int, *_: object) -> None:
    if status:
        raise failure(library, status)


def _created(library: ctypes.CDLL, made: int | None, *_: object) -> int:
    if not made:
        raise NativeOutOfMemory(library.rl_error().decode(errors="replace"))
    return made


def load(report: Callable[[str], None] | None = None, instructions: str = "best") -> ctypes.CDLL:
    """Load the library for this machine: compiled earlier, packaged, or compiled now.

    A cached library that cannot be loaded is compiled again. If the system refuses the processor's
    tile unit, the library does without. `instructions` is one of `INSTRUCTIONS`, for tests and
    comparisons. `report` is called before a compilation. Raises `NativeUnavailable`.
    """
    if instructions == "best":
        return load_best(report)[0]
    return _load(report, INSTRUCTIONS[instructions], None)


def load_best(
    report: Callable[[str], None] | None = None, compile_here: bool = False
) -> tuple[ctypes.CDLL, str]:
    """Load as `load` does; return the library and the reason for doing without the tile unit, or
    "". `compile_here` ignores the packaged library."""
    processor = read_processor()

    def load_without(names: tuple[str, ...], target: tuple[str, ...] | None) -> ctypes.CDLL:
        prebuilt = None if compile_here else prebuilt_library(processor, names)
        return _load(report, target, prebuilt)

    try:
        return load_without((), INSTRUCTIONS["best"]), ""
    except InstructionsRefused as error:
        log.warning("computing without the tile unit: %s", error)
        return load_without(("amx",), INSTRUCTIONS["no-tiles"]), str(error)


def _load(
    report: Callable[[str], None] | None, target: tuple[str, ...] | None, prebuilt: Path | None
) -> ctypes.CDLL:
    try:
        with library_file(report=report, target=target, prebuilt=prebuilt) as path:
            try:
                return open_library(str(path))
            except InstructionsRefused:
                raise
            except NativeUnavailable as error:
                log.warning("%s is replaced: %s", path, error)
                if path == prebuilt:
                    prebuilt = None
                else:
                    path.unlink(missing_ok=True)
        with library_file(report=report, target=target, prebuilt=prebuilt) as path:
            return open_library(str(path))
    except OSError as error:  # for example, no place for temporary files
        raise NativeUnavailable(f"the kernels cannot be compiled: {error}") from error


def open_library(path: str) -> ctypes.CDLL:
    """Load a library and declare its functions. Raises `NativeUnavailable`, or its subclass
    `InstructionsRefused`."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise NativeUnavailable(f"the compiled kernels cannot be loaded: {error}") from error
    for name in FUNCTIONS:
        if not hasattr(library, name):
            raise NativeUnavailable(f"the compiled kernels have no {name}")
        declare(library, name)
    if refused := library.rl_prepare():
        raise InstructionsRefused(f"the system refuses it: {os.strerror(refused)}")
    sizes = (c_int64 * len(STRUCTURES))()
    library.rl_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(structure) for structure in STRUCTURES]:
        raise NativeUnavailable("the compiled kernels lay out structures in another way")
    return library
