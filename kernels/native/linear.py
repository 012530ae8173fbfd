"""Weights packed for `src/linear.cpp`, and products with them."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from rootlace.kernels.native.handles import Team
from rootlace.kernels.native.library import BFLOAT16, FLOAT32, Linear
from rootlace.kernels.native.memory import mapped

DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
LINE = 64


class Epilogue(enum.IntEnum):
    """What follows a product: `Epilogue` of linear.h."""

    STORE = 0
    FLOAT32 = 1
    ADD = 2
    SILU_MUL = 3


class Arena:
    """Memory for weights, 64-byte aligned, in huge pages where the system gives them.

    Weights are read as one stream, and every page costs a look into the page tables. Memory is
    mapped in chunks; what is not taken of one is never touched.
    """

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """`size` bytes (uint8), zero. They live as long as the tensor does."""
        rounded = -(-size // LINE) * LINE
        if len(self._free) < rounded:
            self._free = mapped(max(rounded, self.CHUNK))
        taken, self._free = self._free[:size], self._free[rounded:]
        return taken


class PackedLinear:
    """y = x W^T + bias with W [outputs, inputs], float32 or bfloat16.

    `gated`: W's rows are those of the gate, then those of the values it gates; only for
    `Epilogue.SILU_MUL`.
    The packed weights are allocated in `arena`; `bias` [outputs] of any dtype is kept in float32.
    Raises ValueError.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        arena: Arena | None = None,
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
        self.library, self.team = library, team
        self.dtype = weight.dtype
        self.inputs, self.outputs, self.gated = inputs, outputs, gated
        self.bias = None if bias is None else bias.detach().float().contiguous()
        kind = DTYPES[weight.dtype]
        size = library.rl_packed_bytes(kind, outputs, inputs, gated)
        self.packed = (arena or Arena()).take(size)
        rows = weight.detach().contiguous()
        library.rl_pack(
            team.handle, kind, rows.data_ptr(), outputs, inputs, gated, self.packed.data_ptr()
        )

    @property
    def structure(self) -> Linear:
        """For C; valid as long as this object is."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Linear(self.packed.data_ptr(), bias, self.inputs, self.outputs)

    def multiply(self, epilogue: Epilogue, x: Tensor, out: Tensor) -> None:
        """x [rows, inputs] of the weights' dtype; out, contiguous, as linear.h says. For tests: a
        forward pass runs all its products in one call. Raises ValueError."""
        Products([self]).multiply(epilogue, x, out)


class Products:
    """Products of one shape, computed one after another in one call, as in a forward pass."""

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        self._first = linears[0]
        self._held = list(linears)
        self._structures = (Linear * len(linears))(*(one.structure for one in linears))

    def multiply(self, epilogue: Epilogue, x: Tensor, out: Tensor) -> None:
        """Multiply the same x by each of the weights, into the same out. Raises ValueError.

        Rows of x may lie apart; an odd number of cache lines from one to the next is quickest.
        """
        first = self._first
        gated = epilogue == Epilogue.SILU_MUL
        if gated != first.gated:
            raise ValueError("weights are packed as gated for SILU_MUL and for nothing else")
        own = epilogue in (Epilogue.STORE, Epilogue.SILU_MUL)
        columns = first.outputs // 2 if gated else first.outputs
        for name, tensor, dtype, shape in (
            ("x", x, first.dtype, (x.shape[0], first.inputs)),
            ("out", out, first.dtype if own else torch.float32, (x.shape[0], columns)),
        ):
            whole = tensor[:1] if name == "x" else tensor
            if tensor.dtype != dtype or tensor.shape != shape or not whole.is_contiguous():
                raise ValueError(
                    f"{name} is contiguous {shape} of {dtype}, not {tuple(tensor.shape)} of "
                    f"{tensor.dtype}"
                )
        first.library.rl_linear(
            first.team.handle,
            DTYPES[first.dtype],
            epilogue,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._structures,
            len(self._held),
            out.data_ptr(),
        )
