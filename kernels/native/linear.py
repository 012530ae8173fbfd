"""Weights packed for `src/linear.cpp`, and products with them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from rootlace.kernels.arrays import as_array
from rootlace.kernels.native import library as native
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.machine import mapped
from rootlace.kernels.native.packed import LINE, Epilogue, Packed
from rootlace.kernels.reference.layers import flat_scales
from rootlace.kernels.weights import CODES, Dense, Quantised, Weight, parts_of, rows_of, same

# Codes --------------------------------------------------------------------------------------------
#
# Quantised weights, in the form that the kernels in C++ take (`src/codes.h`).


CHUNK = 16
"""Inputs of a chunk; groups are whole chunks."""
CODE_KINDS = {"int8": 0, "fp8_e4m3": 1}
FOUR_BITS, SIX_BITS = 2, 3
NUMBERS = {
    None: -1,
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.uint8: 4,
}
TABLE = ctypes.c_float * 16


def parts_packed(weight: Weight, gated: bool) -> tuple[Dense | Quantised, ...]:
    """Return the parts that are packed side by side: gate and values, or the whole weight."""
    parts = parts_of(weight)
    if not gated or len(parts) > 1:
        return parts
    gate, values = torch.arange(weight.shape[0]).chunk(2)
    return rows_of(parts[0], gate), rows_of(parts[0], values)


def why_not(parts: Sequence[Dense | Quantised], gated: bool) -> str | None:
    """Return the reason why the kernels cannot multiply by the parts (gate and values, if gated);
    None if they can."""
    found = [part for part in parts if isinstance(part, Quantised)]
    if len(found) != len(parts):
        return "some of what is packed together is dense"
    if len(parts) > (2 if gated else 1) or len({part.shape[0] for part in parts}) > 1:
        return "parts of unlike schemes are packed together"
    first = found[0].order
    if any(not same(part.order, first) for part in found):
        return "what is packed together has unlike orders of columns"
    for part in found:
        if part.group % CHUNK and part.group != part.shape[1]:
            return f"groups are not of whole {CHUNK} inputs, but of {part.group}"
        if not _finite(part):
            return "some scales or codes are not finite"
    return None


def _finite(weight: Quantised) -> bool:
    for tensor in (weight.scales, weight.offsets, weight.units, weight.offset_units):
        if tensor is not None and not bool(tensor.isfinite().all()):
            return False
    if weight.kind != "fp8_e4m3":
        return True
    return not bool((weight.values.view(torch.uint8) & 127).eq(127).any())


def prepared(weight: Quantised) -> Quantised:
    """Return the same weight in the form that the kernels take."""
    if _alike(weight) and _whole(weight):
        return weight
    scales, offsets = flat_scales(weight)
    return replace(weight, scales=scales, offsets=offsets, units=None, offset_units=None)


def _alike(weight: Quantised) -> bool:
    """Return whether scales and offsets have units of one form, or none."""
    units, others = weight.units, weight.offset_units
    if weight.offsets is None or (units is None and others is None):
        return True
    if units is None or others is None:
        return False
    return units.dtype == others.dtype and units.shape == others.shape


def _whole(weight: Quantised) -> bool:
    """Return whether units cover whole pairs of chunks, in which four-bit codes are packed."""
    if weight.units is None or weight.kind in CODE_KINDS:
        return True
    return weight.shape[1] // weight.units.shape[1] % (2 * CHUNK) == 0


def scheme_of(weight: Quantised) -> native.Scheme:
    """Return the C structure of a `prepared` weight's scheme."""
    code = CODES[weight.scheme.codes]
    units = weight.units
    group = 0 if weight.group == weight.shape[1] else weight.group
    codes, least = CODE_KINDS.get(weight.kind, FOUR_BITS), 0
    if weight.kind == "int8" and group:
        # A file's codes of five or six bits arrive as int8; a range below 64 fits six bits.
        least, most = (int(one) for one in weight.values.aminmax())
        codes, least = (SIX_BITS, least) if most - least < 64 else (codes, 0)
    return native.Scheme(
        codes=codes,
        group=group,
        least=least,
        scales=NUMBERS[weight.scales.dtype],
        offsets=NUMBERS[None if weight.offsets is None else weight.offsets.dtype],
        units=NUMBERS[None if units is None else units.dtype],
        unit_groups=1 if units is None else weight.scales.shape[1] // units.shape[1],
        table=TABLE(*(code.table or ())),
    )


class Source:
    """Weight to pack, as a C structure, valid while this object lives."""

    def __init__(self, weight: Quantised) -> None:
        parts = (weight.values, weight.scales, weight.offsets, weight.units, weight.offset_units)
        self._held = [None if part is None else part.contiguous() for part in parts]
        addresses = [None if part is None else part.data_ptr() for part in self._held]
        self.structure = native.Source(*addresses)


# Linear -------------------------------------------------------------------------------------------


DTYPES = {torch.float32: native.FLOAT32, torch.bfloat16: native.BFLOAT16}


class Arena:
    """Memory for weights, 64-byte aligned, in huge pages if the system gives them.

    Weights are read as one stream, and every page costs a look-up in the page tables. Memory is
    mapped in chunks; unused parts of a chunk are never touched.
    """

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """Return `size` zero bytes (uint8), alive as long as the array."""
        rounded = -(-size // LINE) * LINE
        if len(self._free) < rounded:
            self._free = mapped(max(rounded, self.CHUNK))
        taken, self._free = self._free[:size], self._free[rounded:]
        return taken


class Packer(msgspec.Struct, frozen=True):
    """Packs weights for activations in `dtype`, float32 or bfloat16. Raises ValueError for another
    one.

    Products of bfloat16 with int8 that has one scale for an output are of integers, where the
    processor has such products; src/byte_rows.h bounds their error. So are, with AVX2, and with
    AVX-512 that has no tiles, those with all other codes that stand for integers
    (src/group_products.h). The others have the bits of products with the numbers that codes stand
    for."""

    library: ctypes.CDLL
    team: Team
    dtype: torch.dtype
    arena: Arena = msgspec.field(default_factory=Arena)
    """Allocates packed weights."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"activations are in float32 or bfloat16, not in {self.dtype}")

    def pack(self, weight: Weight, *, gated: bool = False) -> Packed:
        """Pack a weight. `gated`: W's rows are the gate's, then those of the gated values.

        Gate and values may be stacked weights of unlike schemes. A bias of any dtype is kept in
        float32. Raises ValueError, also for codes without kernels (`why_not`).
        """
        outputs, inputs = weight.shape
        if not outputs or not inputs:
            raise ValueError(f"weights of shape {[outputs, inputs]}")
        if gated and outputs % 2:
            raise ValueError(f"{outputs} rows are not a gate and as many values")
        bias = _bias(weight)
        if isinstance(weight, Dense):
            memory = self._numbers(weight.matrix, gated)
            return Packed(memory, outputs, inputs, bias)
        parts = parts_packed(weight, gated)
        reason = why_not(parts, gated)
        if reason is not None:
            raise ValueError(reason)
        found = [prepared(part) for part in parts if isinstance(part, Quantised)]
        schemes = (native.Scheme * len(found))(*(scheme_of(part) for part in found))
        order = None if found[0].order is None else as_array(found[0].order)
        memory = self._codes(found, schemes)
        return Packed(memory, outputs, inputs, bias, order, schemes)

    def _numbers(self, matrix: Tensor, gated: bool) -> np.ndarray:
        if matrix.dim() != 2 or matrix.dtype != self.dtype:
            found = f"{list(matrix.shape)} in {matrix.dtype}"
            raise ValueError(f"weights are a matrix in {self.dtype}, not {found}")
        dtype, shape = DTYPES[self.dtype], (*matrix.shape, gated)
        packed = self.arena.take(self.library.rl_packed_bytes(dtype, *shape))
        rows = matrix.detach().contiguous()
        at = packed.ctypes.data
        self.library.rl_pack(self.team.handle, dtype, rows.data_ptr(), *shape, at)
        return packed

    def _codes(
        self, parts: Sequence[Quantised], schemes: ctypes.Array[native.Scheme]
    ) -> np.ndarray:
        shape = (DTYPES[self.dtype], *parts[0].shape, len(parts), schemes)
        packed = self.arena.take(self.library.rl_codes_bytes(*shape))
        for index, part in enumerate(parts):
            source = Source(part)
            self.library.rl_pack_codes(
                *(self.team.handle, *shape, index),
                *(ctypes.addressof(source.structure), packed.ctypes.data),
            )
        return packed


class Products:
    """Products y = x W^T + bias with weights of one shape, one after another in one call, as in a
    forward pass; for measurements and tests.

    `gated` weights need a `gated` epilogue; see `Packer.pack`.
    """

    def __init__(self, packer: Packer, weights: Sequence[Weight], *, gated: bool = False) -> None:
        self.gated = gated
        self._packer = packer
        self._held = [packer.pack(weight, gated=gated) for weight in weights]
        structures = [packed.structure() for packed in self._held]
        self._structures = (native.Linear * len(structures))(*structures)

    def multiply(self, epilogue: Epilogue, x: Tensor, out: Tensor) -> None:
        """Multiply x [rows, inputs], of the weights' dtype, by each weight, into the same
        contiguous out, as linear.h specifies. Raises ValueError.

        Rows of x may have any distance; an odd number of cache lines between rows is fastest.
        """
        first, packer, gated = self._held[0], self._packer, self.gated
        if gated != epilogue.gated:
            raise ValueError("weights are packed as gated for gated epilogues and for nothing else")
        stored = not epilogue.wide
        columns = first.outputs // 2 if gated else first.outputs
        for name, tensor, dtype, shape in (
            ("x", x, packer.dtype, (x.shape[0], first.inputs)),
            ("out", out, packer.dtype if stored else torch.float32, (x.shape[0], columns)),
        ):
            whole = tensor[:1] if name == "x" else tensor
            if tensor.dtype != dtype or tensor.shape != shape or not whole.is_contiguous():
                raise ValueError(
                    f"{name} is contiguous {shape} of {dtype}, not {tuple(tensor.shape)} of "
                    f"{tensor.dtype}"
                )
        packer.library.rl_linear(
            packer.team.handle,
            DTYPES[packer.dtype],
            epilogue,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            self._structures,
            len(self._held),
            out.data_ptr(),
        )


def _bias(weight: Weight) -> np.ndarray | None:
    biases = []
    for part in parts_of(weight):
        rows = part.shape[0]
        bias = torch.zeros(rows) if part.bias is None else part.bias.detach().float()
        if bias.shape != (rows,):
            raise ValueError(f"a bias of shape {list(bias.shape)} for {rows} outputs")
        biases.append(bias)
    if all(part.bias is None for part in parts_of(weight)):
        return None
    return as_array(torch.cat(biases))
