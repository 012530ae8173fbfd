"""Weights packed for `src/linear.cpp`, for an engine without torch: see `linear`."""

from __future__ import annotations

import ctypes
import enum
from typing import Any, get_args

import ml_dtypes
import msgspec
import numpy as np

from rootlace.kernels.codes import Codes
from rootlace.kernels.native import library as native

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
ACTIVATIONS: dict[np.dtype[Any], int] = {FLOAT32: native.FLOAT32, BFLOAT16: native.BFLOAT16}
"""Dtypes of activations, with their numbers in C++."""
LINE = 64
KINDS = frozenset({"dense", *get_args(Codes)})
"""Kinds of weights that the native kernels multiply by."""


class Epilogue(enum.IntEnum):
    """Operation after a product: `Epilogue` of linear.h."""

    STORE = 0
    FLOAT32 = 1
    ADD = 2
    SILU_MUL = 3
    GELU_MUL = 4
    RELU = 5
    GELU = 6
    GELU_TANH = 7
    CLAMPED_MUL = 8

    @property
    def gated(self) -> bool:
        return self in (Epilogue.SILU_MUL, Epilogue.GELU_MUL, Epilogue.CLAMPED_MUL)

    @property
    def wide(self) -> bool:
        """Return whether the epilogue writes float32, whatever the activations' dtype."""
        return self in (Epilogue.FLOAT32, Epilogue.ADD)


class Packed(msgspec.Struct, frozen=True):
    """Packed W [outputs, inputs] for `src/linear.cpp`. `schemes`: those of codes; None for dense
    weights."""

    memory: np.ndarray  # uint8
    outputs: int
    inputs: int
    bias: np.ndarray | None = None  # float32 [outputs]
    order: np.ndarray | None = None  # int32 [inputs]
    schemes: ctypes.Array[native.Scheme] | None = None

    def rows(self, library: ctypes.CDLL, dtype: np.dtype[Any], rows: np.ndarray) -> np.ndarray:
        """Return the values of the codes of `rows` (int32 [n], not checked), float32 [n, inputs].
        `dtype`: the activations' dtype that W was packed for."""
        found = np.empty((len(rows), self.inputs), np.float32)
        at, to = np.ascontiguousarray(rows, np.int32), found.ctypes.data
        weights = ctypes.byref(self.structure())
        library.rl_rows(ACTIVATIONS[dtype], weights, at.ctypes.data, len(at), to)
        return found

    def products(self, library: ctypes.CDLL, team: native.Team, rows: np.ndarray) -> np.ndarray:
        """Return products with `rows`, float32 [n, outputs]. `rows` [n, inputs] are contiguous and
        have the dtype that W was packed for."""
        found = np.empty((len(rows), self.outputs), np.float32)
        structure = self.structure()
        library.rl_linear(
            *(team.handle, ACTIVATIONS[rows.dtype], Epilogue.FLOAT32),
            *(rows.ctypes.data, self.inputs, len(rows)),
            *(ctypes.byref(structure), 1, found.ctypes.data),
        )
        return found

    def structure(self, factor: float = 1.0) -> native.Linear:
        """Return the C structure, valid while this object lives. `factor` multiplies float32
        products."""
        bias = None if self.bias is None else self.bias.ctypes.data
        order = None if self.order is None else self.order.ctypes.data
        return native.Linear(
            packed=self.memory.ctypes.data,
            bias=bias,
            inputs=self.inputs,
            outputs=self.outputs,
            schemes=self.schemes,
            order=order,
            factor=factor,
        )
