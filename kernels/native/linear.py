"""Weights packed for `src/linear.cpp`, and single products with them."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import mmap

import torch
from torch import Tensor

from rootlace.kernels.native.library import BFLOAT16, FLOAT32, Linear

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
HUGE_PAGE = 2 << 20
LINE = 64


class Epilogue(enum.IntEnum):
    """What follows a product: `Epilogue` of linear.h."""

    STORE = 0
    FLOAT32 = 1
    ADD = 2
    SILU_MUL = 3


def allocate(size: int) -> Tensor:
    """`size` bytes (uint8), zero, 64-byte aligned, in huge pages where the system gives them.

    Weights are read as one stream: with pages of 4 KB one core reads about a sixth slower.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(size, 1) + HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE
    return whole[begin : begin + size]


def packed_bytes(library: ctypes.CDLL, weight: Tensor, gated: bool = False) -> int:
    """What `PackedLinear` of that weight takes, a multiple of 64."""
    outputs, inputs = weight.shape
    size: int = library.rl_packed_bytes(DTYPES[weight.dtype], outputs, inputs, gated)
    return -(-size // LINE) * LINE


class PackedLinear:
    """y = x W^T + bias with W [outputs, inputs], float32 or bfloat16.

    `gated`: W's rows are a gate's and then as many of its values, for `Epilogue.SILU_MUL` alone.
    `storage` (uint8, `packed_bytes` long, 64-byte aligned) receives the packed weights; by default
    it is allocated. `bias` [outputs] of any dtype is kept in float32. `team` is an address from
    `rl_team_new`. Raises ValueError.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        team: int,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        storage: Tensor | None = None,
    ) -> None:
        if weight.dim() != 2 or weight.dtype not in DTYPES or 0 in weight.shape:
            raise ValueError(
                "weights are a float32 or bfloat16 matrix, not "
                f"{tuple(weight.shape)} of {weight.dtype}"
            )
        outputs, inputs = weight.shape
        if gated and outputs % 2:
            raise ValueError(f"{outputs} rows are not a gate and as many values")
        if bias is not None and bias.shape != (outputs,):
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {outputs} outputs")
        size = packed_bytes(library, weight, gated)
        if storage is None:
            storage = allocate(size)
        if storage.dtype != torch.uint8 or storage.shape != (size,) or storage.data_ptr() % LINE:
            raise ValueError(f"storage is {size} bytes at a multiple of {LINE}")
        self.dtype = weight.dtype
        self.inputs, self.outputs, self.gated = inputs, outputs, gated
        self.storage = storage
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self._library, self._team = library, team
        rows = weight.detach().contiguous()
        library.rl_pack(
            team, DTYPES[self.dtype], rows.data_ptr(), outputs, inputs, gated, storage.data_ptr()
        )

    @property
    def structure(self) -> Linear:
        """For C; valid as long as this object is."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Linear(self.storage.data_ptr(), bias, self.inputs, self.outputs)

    def multiply(self, epilogue: Epilogue, x: Tensor, out: Tensor) -> None:
        """x [rows, inputs] of the weights' dtype; out as linear.h says, written in place.

        For tests and measurements: a forward pass runs all its products in one call. Raises
        ValueError.
        """
        gated = epilogue == Epilogue.SILU_MUL
        if gated != self.gated:
            raise ValueError("weights are packed as gated for SILU_MUL and for nothing else")
        own = epilogue in (Epilogue.STORE, Epilogue.SILU_MUL)
        columns = self.outputs // 2 if gated else self.outputs
        for name, tensor, dtype, shape in (
            ("x", x, self.dtype, (x.shape[0], self.inputs)),
            ("out", out, self.dtype if own else torch.float32, (x.shape[0], columns)),
        ):
            if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is contiguous {shape} of {dtype}, not {tuple(tensor.shape)} of "
                    f"{tensor.dtype}"
                )
        weights = self.structure
        self._library.rl_linear(
            self._team,
            DTYPES[self.dtype],
            epilogue,
            x.data_ptr(),
            x.shape[0],
            ctypes.byref(weights),
            out.data_ptr(),
        )
