"""`src/api.h` in ctypes: structures, and functions that check nothing but raise `NativeError`.

Calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from rootlace.kernels.native.build import (
    NativeUnavailable,
    library_file,
    prebuilt_library,
    read_processor,
)

# Errors -------------------------------------------------------------------------------------------
#
# What a call of the native kernels raises. Whoever asked for it may go on, the team too.


class NativeError(RuntimeError):
    """A C++ exception ended the call; what it was to write is undefined."""


class NativeOutOfMemory(NativeError, MemoryError):
    """The call had no memory for its own buffers."""


# Handles ------------------------------------------------------------------------------------------
#
# What the library hands out, freed with the Python object that holds it.


class Team:
    """Threads that compute, the calling one among them; see `src/team.h`."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.handle: int = library.rl_team_new(threads)
        _free_with(self, library.rl_team_free, self.handle)


class Workspace:
    """Buffers that the forward pass of one model keeps between steps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.handle: int = library.rl_workspace_new()
        _free_with(self, library.rl_workspace_free, self.handle)


def _free_with(holder: object, free: Callable[[int], None], handle: int) -> None:
    # Not when the interpreter ends: a daemon thread may be inside a call then.
    weakref.finalize(holder, free, handle).atexit = False


# Library ------------------------------------------------------------------------------------------


FLOAT32, BFLOAT16 = 0, 1
LANES = 16
"""Numbers in a vector of `src/isa/vector.h`, whatever the processor."""

log = logging.getLogger(__name__)


class Scheme(ctypes.Structure):
    _fields_ = [
        ("codes", c_int32),
        ("group", c_int32),
        ("scales", c_int32),
        ("offsets", c_int32),
        ("units", c_int32),
        ("unit_groups", c_int32),
        ("least", c_int32),
        ("table", c_float * 16),
    ]


class Source(ctypes.Structure):
    _fields_ = [
        ("values", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("units", c_void_p),
        ("offset_units", c_void_p),
    ]


class Linear(ctypes.Structure):
    _fields_ = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("schemes", POINTER(Scheme)),
        ("order", c_void_p),
        ("factor", c_float),
        ("alpha", c_float),
        ("limit", c_float),
        ("path", c_int32),
    ]


class Norm(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class Expert(ctypes.Structure):
    _fields_ = [("gate_up", Linear), ("down", Linear)]


class Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", Norm),
        ("attention_out_norm", Norm),
        ("post_norm", Norm),
        ("mlp_out_norm", Norm),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Linear * 3),
        ("output", Linear),
        ("q_up", Linear),
        ("k_up", POINTER(Linear)),
        ("v_up", POINTER(Linear)),
        ("gate_up", Linear),
        ("down", Linear),
        ("router", Linear),
        ("shared_gate", Linear),
        ("experts", POINTER(Expert)),
        ("correction", c_void_p),
        ("sinks", c_void_p),
        ("qkv_parts", c_int32),
        ("window", c_int32),
        ("rotation", c_int32),
    ]


class Mixture(ctypes.Structure):
    _fields_ = [
        ("count", c_int32),
        ("chosen", c_int32),
        ("inner", c_int32),
        ("normalised", c_int32),
        ("sigmoid", c_int32),
        ("groups", c_int32),
        ("chosen_groups", c_int32),
        ("best_of_group", c_int32),
        ("activation", c_int32),
        ("factor", c_float),
    ]


class Latent(ctypes.Structure):
    _fields_ = [
        ("rank", c_int32),
        ("plain", c_int32),
        ("values", c_int32),
        ("query_rank", c_int32),
        ("eps", c_float),
    ]


class LowRank(ctypes.Structure):
    _fields_ = [("a", Linear), ("b", Linear * 3)]


Sum = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64)
"""Where float32 numbers lie, and how many, whose sum over processes is wanted -> 0, or a fault."""


class Model(ctypes.Structure):
    _fields_ = [
        ("dtype", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("inner", c_int32),
        ("num_layers", c_int32),
        ("vocab", c_int32),
        ("activation", c_int32),
        ("layer_norms", c_int32),
        ("joint_norm", c_int32),
        ("own_norms", c_int32),
        ("parallel", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("score_cap", c_float),
        ("logit_cap", c_float),
        ("embedding_factor", c_float),
        ("embedding", c_void_p),
        ("positions", c_void_p),
        ("final_norm", Norm),
        ("mixture", Mixture),
        ("latent", Latent),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotation_stride", c_int64),
        ("layers", POINTER(Layer)),
        ("head", Linear),
        ("cache", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int32),
        ("kv_bits", c_int32),
        ("adapters", POINTER(LowRank)),
        ("adapter_rank", c_int32),
        ("sum", Sum),
    ]


class Rows(ctypes.Structure):
    _fields_ = [
        ("rows", c_int32),
        ("width", c_int32),
        ("row_start", c_void_p),
        ("context_len", c_void_p),
        ("block_tables", c_void_p),
        ("num_runs", c_int32),
        ("runs", c_void_p),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("tokens", c_int32),
        ("writes", c_int32),
        ("wanted", c_int32),
        ("copies", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("rotations", c_void_p),
        ("query_factors", c_void_p),
        ("slots", c_void_p),
        ("sources", c_void_p),
        ("wanted_tokens", c_void_p),
        ("copied", c_void_p),
        ("rows", Rows),
        ("adapters", c_void_p),
        ("hidden", c_void_p),
        ("nanos", c_void_p),
    ]


class Edits(ctypes.Structure):
    _fields_ = [
        ("bias_start", c_void_p),
        ("bias_token", c_void_p),
        ("bias", c_void_p),
        ("mask_table", c_void_p),
        ("mask_words", c_int64),
        ("mask_row", c_void_p),
        ("seen_start", c_void_p),
        ("seen_token", c_void_p),
        ("seen_count", c_void_p),
        ("penalties", c_void_p),
    ]


STRUCTURES = (
    *(Scheme, Source, Linear, Norm, Expert, Layer, Mixture, Latent, LowRank, Model),
    *(Rows, Step, Edits),
)


class Status(c_int32):
    """The result of a function that may fail: `declare` has it raised."""


class Created(c_void_p):
    """A handle that a function made; null where memory ran out."""


# Name -> (result, arguments). Arrays are passed as addresses.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "rl_prepare": (c_int32, []),
    "rl_instructions": (c_char_p, []),
    "rl_error": (c_char_p, []),
    "rl_sizes": (None, [c_void_p]),
    "rl_team_new": (Created, [c_int32]),
    "rl_team_free": (None, [c_void_p]),
    "rl_team_size": (c_int32, [c_void_p]),
    "rl_workspace_new": (Created, []),
    "rl_workspace_free": (None, [c_void_p]),
    "rl_forward": (Status, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "rl_logits": (Status, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "rl_penalties": (c_char_p, []),
    "rl_pick_params": (c_char_p, []),
    "rl_pick": (Status, [c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "rl_scores": (
        Status,
        [c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p, c_void_p, c_void_p],
    ),
    "rl_edit": (Status, [c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "rl_team_try": (c_int64, [c_void_p, c_int32, c_int32, c_int64, c_void_p]),
    "rl_team_fail": (Status, [c_void_p, c_int32, c_int32, c_int64]),
    "rl_paths": (c_int32, [c_int32]),
    "rl_packed_bytes": (c_int64, [c_int32] * 5),
    "rl_pack": (Status, [c_void_p, c_int32, c_int32, c_void_p, *[c_int32] * 3, c_void_p]),
    "rl_codes_bytes": (c_int64, [*[c_int32] * 5, c_void_p]),
    "rl_pack_codes": (
        Status,
        [c_void_p, *[c_int32] * 5, c_void_p, c_int32, c_void_p, c_void_p],
    ),
    "rl_rows": (Status, [c_int32, c_void_p, c_void_p, c_int32, c_void_p]),
    "rl_linear": (
        Status,
        [c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int32, c_void_p, c_int32, c_void_p],
    ),
    "rl_attention": (
        Status,
        [
            *(c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p),
            *(c_int64, c_void_p, c_void_p, c_int32, c_int64, c_int32),
            *(c_float, c_float, c_void_p, c_void_p),
        ],
    ),
    "rl_write_kv": (
        Status,
        [
            *(c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p),
            *(c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
        ],
    ),
    "rl_copy_kv": (
        Status,
        [
            *(c_void_p, c_int32, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p),
            *(c_int32, c_int64, c_void_p),
        ],
    ),
}


INSTRUCTIONS: dict[str, tuple[str, ...] | None] = {
    "best": None,
    "no-tiles": ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"),
}
"""What a library may be compiled for, as flags: all that this processor has, or less."""


class InstructionsRefused(NativeUnavailable):
    """The operating system does not let this process use the library's instructions."""


NO_MEMORY = 1
"""`RL_NO_MEMORY` of api.h."""


def declare(library: ctypes.CDLL, name: str) -> None:
    """Say what the function `name` takes, and have it raise `NativeError` where it fails."""
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


def _done(library: ctypes.CDLL, status: int, *_: object) -> None:
    if status:
        kind = NativeOutOfMemory if status == NO_MEMORY else NativeError
        raise kind(library.rl_error().decode(errors="replace"))


def _created(library: ctypes.CDLL, made: int | None, *_: object) -> int:
    if not made:
        raise NativeOutOfMemory(library.rl_error().decode(errors="replace"))
    return made


def load(report: Callable[[str], None] | None = None, instructions: str = "best") -> ctypes.CDLL:
    """The library for this machine: one that was compiled here, else the one that came with the
    package, else compiled now.

    One from the cache that cannot be loaded is compiled again. Where the system refuses the
    processor's tile unit, the library does without. `instructions` is one of `INSTRUCTIONS`, for
    tests and comparisons. `report` is told that a compilation begins. Raises `NativeUnavailable`.
    """
    if instructions == "best":
        return load_best(report)[0]
    return _load(report, INSTRUCTIONS[instructions], None)


def load_best(
    report: Callable[[str], None] | None = None, compile_here: bool = False
) -> tuple[ctypes.CDLL, str]:
    """See `load`; and why the library does without the tile unit, "" where nothing was refused.
    `compile_here`: what came with the package does not count."""
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
    except OSError as error:  # no place for temporary files, say
        raise NativeUnavailable(f"the kernels cannot be compiled: {error}") from error


def open_library(path: str) -> ctypes.CDLL:
    """Load a library and say what its functions take. Raises `NativeUnavailable`, of which
    `InstructionsRefused` is one kind."""
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
