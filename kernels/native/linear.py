"""Weights packed for `src/linear.cpp`, and products with them."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rootlace.kernels.native import library as native
from rootlace.kernels.native.codes import Source, parts_packed, prepared, scheme_of, why_not
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.machine import mapped
from rootlace.kernels.weights import Dense, Quantised, Weight, parts_of

DTYPES = {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16}
LINE = 64


class ProductPath(enum.IntEnum):
    """How products go through a weight: `RlPath` of api.h."""

    BEST = 0
    VECTORS = 1


ChoosePath = Callable[[int, int, bool], ProductPath]
"""The path of a weight of so many outputs and inputs, gated or not."""


class Epilogue(enum.IntEnum):
    """What follows a product: `Epilogue` of linear.h."""

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
        """Whether it writes float32, whatever the activations are in."""
        return self in (Epilogue.FLOAT32, Epilogue.ADD)


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


@dataclass(frozen=True)
class Packed:
    """W [outputs, inputs] as `src/linear.cpp` reads it. `schemes`: of codes, None for numbers."""

    memory: Tensor  # uint8
    outputs: int
    inputs: int
    bias: Tensor | None = None  # float32 [outputs]
    order: Tensor | None = None  # int32 [inputs]
    schemes: ctypes.Array[native.Scheme] | None = None
    path: ProductPath = ProductPath.BEST

    def structure(self, factor: float = 1.0) -> native.Linear:
        """For C; valid as long as this object is. `factor`: what products are multiplied by where
        they are float32."""
        bias = None if self.bias is None else self.bias.data_ptr()
        order = None if self.order is None else self.order.data_ptr()
        return native.Linear(
            packed=self.memory.data_ptr(),
            bias=bias,
            inputs=self.inputs,
            outputs=self.outputs,
            schemes=self.schemes,
            order=order,
            factor=factor,
            path=self.path,
        )


@dataclass(frozen=True)
class Packer:
    """Packs weights for activations in `dtype`, float32 or bfloat16. Raises ValueError for another
    one.

    Products of bfloat16 with int8 that has one scale for an output are of integers, where the
    processor has such products; src/byte_rows.h bounds their error. So are, with AVX-512 that has
    bfloat16, but no tiles, those with all other codes that stand for integers
    (src/group_products.h). The others have the bits of products with the numbers that codes stand
    for.

    `path_of` chooses the path of each weight's products. Paths differ in their results' bits."""

    library: ctypes.CDLL
    team: Team
    dtype: torch.dtype
    arena: Arena = field(default_factory=Arena)
    """Where packed weights are allocated."""
    path_of: ChoosePath = lambda outputs, inputs, gated: ProductPath.BEST

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"activations are in float32 or bfloat16, not in {self.dtype}")

    def pack(
        self, weight: Weight, *, gated: bool = False, path: ProductPath | None = None
    ) -> Packed:
        """`gated`: W's rows are those of the gate, then those of the values it gates. Gate and
        values may be stacked weights of unlike schemes. A bias of any dtype is kept in float32.
        `path` None: `path_of` chooses. Raises ValueError, also for codes that there are no kernels
        for (`codes.why_not`)."""
        outputs, inputs = weight.shape
        if not outputs or not inputs:
            raise ValueError(f"weights of shape {[outputs, inputs]}")
        if gated and outputs % 2:
            raise ValueError(f"{outputs} rows are not a gate and as many values")
        bias = _bias(weight)
        if path is None:
            path = self.path_of(outputs, inputs, gated)
        if isinstance(weight, Dense):
            memory = self._numbers(weight.matrix, gated, path)
            return Packed(memory, outputs, inputs, bias, path=path)
        parts = parts_packed(weight, gated)
        reason = why_not(parts, gated)
        if reason is not None:
            raise ValueError(reason)
        found = [prepared(part) for part in parts if isinstance(part, Quantised)]
        schemes = (native.Scheme * len(found))(*(scheme_of(part) for part in found))
        order = None if found[0].order is None else found[0].order.contiguous()
        memory = self._codes(found, schemes, path)
        return Packed(memory, outputs, inputs, bias, order, schemes, path)

    def _numbers(self, matrix: Tensor, gated: bool, path: ProductPath) -> Tensor:
        if matrix.dim() != 2 or matrix.dtype != self.dtype:
            found = f"{list(matrix.shape)} in {matrix.dtype}"
            raise ValueError(f"weights are a matrix in {self.dtype}, not {found}")
        form, shape = (DTYPES[self.dtype], path), (*matrix.shape, gated)
        packed = self.arena.take(self.library.rl_packed_bytes(*form, *shape))
        rows = matrix.detach().contiguous()
        self.library.rl_pack(self.team.handle, *form, rows.data_ptr(), *shape, packed.data_ptr())
        return packed

    def _codes(
        self, parts: Sequence[Quantised], schemes: ctypes.Array[native.Scheme], path: ProductPath
    ) -> Tensor:
        shape = (DTYPES[self.dtype], path, *parts[0].shape, len(parts), schemes)
        packed = self.arena.take(self.library.rl_codes_bytes(*shape))
        for index, part in enumerate(parts):
            source = Source(part)
            self.library.rl_pack_codes(
                *(self.team.handle, *shape, index),
                *(ctypes.addressof(source.structure), packed.data_ptr()),
            )
        return packed


class PackedLinear:
    """y = x W^T + bias with packed weights, for measurements and tests; see `Packer`. `gated`
    weights are only for an epilogue that is `gated`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        weight: Weight,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        factor: float = 1.0,
        arena: Arena | None = None,
        path: ProductPath = ProductPath.BEST,
    ) -> None:
        self.library, self.team, self.dtype, self.gated = library, team, dtype, gated
        packer = Packer(library, team, dtype, arena or Arena())
        self._packed = packer.pack(weight, gated=gated, path=path)
        self._factor = factor
        self.inputs, self.outputs = self._packed.inputs, self._packed.outputs

    @property
    def packed(self) -> Tensor:
        """The memory, uint8."""
        return self._packed.memory

    @property
    def structure(self) -> native.Linear:
        """For C; valid as long as this object is."""
        return self._packed.structure(self._factor)

    def multiply(self, epilogue: Epilogue, x: Tensor, out: Tensor) -> None:
        """x [rows, inputs] of the weights' dtype; out, contiguous, as linear.h says. For tests: a
        forward pass runs all its products in one call. Raises ValueError."""
        Products([self]).multiply(epilogue, x, out)


class Products:
    """Products of one shape, computed one after another in one call, as in a forward pass."""

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        self._first = linears[0]
        self._held = list(linears)
        self._structures = (native.Linear * len(linears))(*(one.structure for one in linears))

    def multiply(self, epilogue: Epilogue, x: Tensor, out: Tensor) -> None:
        """Multiply the same x by each of the weights, into the same out. Raises ValueError.

        Rows of x may lie apart; an odd number of cache lines from one to the next is quickest.
        """
        first = self._first
        gated = epilogue.gated
        if gated != first.gated:
            raise ValueError("weights are packed as gated for gated epilogues and for nothing else")
        own = not epilogue.wide
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


def _bias(weight: Weight) -> Tensor | None:
    biases = []
    for part in parts_of(weight):
        rows = part.shape[0]
        bias = torch.zeros(rows) if part.bias is None else part.bias.detach().float()
        if bias.shape != (rows,):
            raise ValueError(f"a bias of shape {list(bias.shape)} for {rows} outputs")
        biases.append(bias)
    if all(part.bias is None for part in parts_of(weight)):
        return None
    return torch.cat(biases).contiguous()
