"""Weights of products: a dense matrix, or a matrix of small codes with scales.

`KernelSet.linear` multiplies by any kind of `Weight`; `KernelSet.weights` names the supported
kinds. A new code needs a line of `CODES`, and kernels beside the reference's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
from msgspec.structs import asdict, replace

from rootlace.kernels.codes import TABLES, Codes


class CodeType(msgspec.Struct, frozen=True):
    """Storage of codes.

    With `table`, two codes share a byte: the code of input 2i is the lower half of byte i, and has
    the value `table[half]`. Otherwise a code is a number of `dtype`, and its own value.
    """

    dtype: torch.dtype
    table: tuple[float, ...] | None = None

    @property
    def in_byte(self) -> int:
        return 1 if self.table is None else 2


CODES: dict[Codes, CodeType] = {
    "int8": CodeType(torch.int8),
    "fp8_e4m3": CodeType(torch.float8_e4m3fn),
    **{codes: CodeType(torch.uint8, table) for codes, table in TABLES.items()},
}

SCALES = (torch.float32, torch.float16, torch.bfloat16)
INTEGER_SCALES = (torch.uint8, torch.int8)


class Dense(msgspec.Struct, frozen=True):
    """Dense weight of x W^T + bias, with W [outputs, inputs] in the activations' dtype."""

    matrix: torch.Tensor
    bias: torch.Tensor | None = None  # [outputs]

    @property
    def kind(self) -> str:
        return "dense"

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return self.matrix.shape[0], self.matrix.shape[1]


class Scheme(msgspec.Struct, frozen=True):
    """Values of stored codes: weight = code's value * scale of its group + the group's offset (with
    `offsets`). A group has `group` consecutive inputs of one output; None: all inputs. Zero points
    become offsets of -zero point * scale."""

    codes: Codes
    group: int | None = None
    offsets: bool = False


class Quantised(msgspec.Struct, frozen=True):
    """Codes and scales of a W [outputs, inputs], by a `scheme`:

        W[o, i] = code(values[o, i]) * scale[o, i // group] + offset[o, i // group]

    Product and sum are in float32, each rounded once; W is then rounded to the activations' dtype.

    Scales and offsets are [outputs, groups] in one of `SCALES`. Or both are small integers in one
    of `INTEGER_SCALES`, to be multiplied by `units` [outputs, units] and `offset_units`. One unit
    serves groups / units consecutive groups.

    order: int32 [inputs]. Column i of the stored matrix belongs to input order[i].

    Raises ValueError for parts that do not fit together.
    """

    scheme: Scheme
    values: torch.Tensor  # [outputs, inputs], or [outputs, inputs / 2] where two share a byte
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # [outputs]
    units: torch.Tensor | None = None
    offset_units: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.scheme.codes not in CODES:
            raise ValueError(f"{self.scheme.codes!r} is not among the codes {', '.join(CODES)}")
        code = CODES[self.scheme.codes]
        if self.values.dim() != 2 or self.values.dtype != code.dtype:
            found = f"{list(self.values.shape)} of {self.values.dtype}"
            raise ValueError(f"{self.kind} codes are a matrix of {code.dtype}, not {found}")
        outputs, inputs = self.shape
        group = self.group
        if group <= 0 or inputs % group:
            raise ValueError(f"{inputs} inputs are not whole groups of {group}")
        if self.scheme.offsets != (self.offsets is not None):
            raise ValueError("offsets are given where the scheme has them, and only there")
        groups = inputs // group
        self._check_scales("scales", self.scales, self.units, (outputs, groups))
        if self.offsets is not None:
            self._check_scales("offsets", self.offsets, self.offset_units, (outputs, groups))
        elif self.offset_units is not None:
            raise ValueError("there are units of offsets, but no offsets")
        if self.bias is not None and self.bias.shape != (outputs,):
            raise ValueError(f"a bias of shape {list(self.bias.shape)} for {outputs} outputs")
        order = self.order
        if order is None:
            return
        if order.dtype != torch.int32 or order.shape != (inputs,):
            raise ValueError(f"an order of {inputs} inputs is as many numbers of int32")
        if not torch.equal(order.sort().values.cpu(), torch.arange(inputs, dtype=torch.int32)):
            raise ValueError(f"an order of {inputs} inputs has each of them once")

    def _check_scales(
        self, name: str, scales: torch.Tensor, units: torch.Tensor | None, shape: tuple[int, int]
    ) -> None:
        allowed = SCALES if units is None else INTEGER_SCALES
        if scales.shape != shape or scales.dtype not in allowed:
            types = ", ".join(str(one).removeprefix("torch.") for one in allowed)
            found = f"{list(scales.shape)} of {scales.dtype}"
            raise ValueError(f"{name} of these codes are {list(shape)} in {types}, not {found}")
        if units is None:
            return
        fits = units.dim() == 2 and len(units) == shape[0] and units.shape[1] > 0
        if not fits or shape[1] % units.shape[1] or units.dtype not in SCALES:
            found = f"{list(units.shape)} of {units.dtype}"
            raise ValueError(f"units of {list(shape)} {name} are not {found}")

    @property
    def kind(self) -> str:
        return self.scheme.codes

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        in_byte = CODES[self.scheme.codes].in_byte
        return self.values.shape[0], self.values.shape[1] * in_byte

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.shape[1] if self.scheme.group is None else self.scheme.group


class Stacked(msgspec.Struct, frozen=True):
    """Weights of unlike schemes for the same inputs; their outputs follow one another."""

    parts: tuple[Dense | Quantised, ...]

    @property
    def kind(self) -> str:
        return " and ".join(dict.fromkeys(part.kind for part in self.parts))

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of outputs and inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Weight = Dense | Quantised | Stacked


def parts_of(weight: Weight) -> tuple[Dense | Quantised, ...]:
    return weight.parts if isinstance(weight, Stacked) else (weight,)


def tensors(weight: Weight) -> list[torch.Tensor]:
    """Return the tensors that a weight keeps in memory."""
    return [tensor for part in parts_of(weight) for _, tensor in _fields(part)]


def unknown_kind(weights: Iterable[Weight], known: Iterable[str]) -> str | None:
    """Return the first kind of weights that is not among `known`; None if all are."""
    kinds = frozenset(known)
    parts = (part for weight in weights for part in parts_of(weight))
    return next((part.kind for part in parts if part.kind not in kinds), None)


def stacked(weights: Sequence[Weight]) -> Weight:
    """Concatenate the outputs of `weights` into one weight. Neighbours of the same kind are merged.
    Raises ValueError if the numbers of inputs differ."""
    parts = [part for weight in weights for part in parts_of(weight)]
    if len({part.shape[1] for part in parts}) != 1:
        raise ValueError(f"weights of unlike inputs: {[list(part.shape) for part in parts]}")
    found: list[Dense | Quantised] = []
    for part in parts:
        joined = _joined(found[-1], part) if found else None
        if joined is None:
            found.append(part)
        else:
            found[-1] = joined
    return found[0] if len(found) == 1 else Stacked(tuple(found))


def rows_of(weight: Dense | Quantised, rows: torch.Tensor) -> Dense | Quantised:
    """Return the outputs `rows` (int64), in this order."""
    chosen = {
        name: tensor if name == "order" else _bytes(tensor).index_select(0, rows).view(tensor.dtype)
        for name, tensor in _fields(weight)
    }
    return replace(weight, **chosen)


def rows_times(weight: Weight, factors: torch.Tensor) -> Weight:
    """Multiply each output by a power of two, float32 [outputs]. Scales of 16 bits become float32,
    so the products are exact."""
    if isinstance(weight, Stacked):
        shares = factors.split([part.shape[0] for part in weight.parts])
        parts = zip(weight.parts, shares, strict=True)
        return stacked([rows_times(part, share) for part, share in parts])
    if isinstance(weight, Dense):
        names = ["matrix"]
    else:
        names = ["scales", "offsets"] if weight.units is None else ["units", "offset_units"]
    found = {name: getattr(weight, name) for name in names}
    changed = {
        name: part.float() * factors.unsqueeze(1)
        for name, part in found.items()
        if part is not None
    }
    if isinstance(weight, Dense):
        changed["matrix"] = changed["matrix"].to(weight.matrix.dtype)
    if weight.bias is not None:
        changed["bias"] = (weight.bias.float() * factors).to(weight.bias.dtype)
    return replace(weight, **changed)


def columns_of(weight: Dense | Quantised, columns: range) -> Dense | Quantised:
    """Return the consecutive inputs `columns`. Raises ValueError if codes lack separate scales
    there, or have an order other than the inputs'."""
    start, stop = columns.start, columns.stop
    if isinstance(weight, Dense):
        return replace(weight, matrix=weight.matrix[:, start:stop].contiguous())
    if weight.order is not None:
        raise ValueError("its columns are not in the order of the inputs")
    in_byte, group = CODES[weight.scheme.codes].in_byte, weight.group
    if weight.scheme.group is None:
        group, groups = in_byte, slice(None)  # the single scale of all inputs
    else:
        groups = slice(start // group, stop // group)
    if start % group or stop % group:
        raise ValueError(f"inputs {start} to {stop} are not whole groups of {group}")
    parts: dict[str, torch.Tensor] = {
        "values": _bytes(weight.values)[:, start // in_byte : stop // in_byte]
    }
    for name, unit in (("scales", "units"), ("offsets", "offset_units")):
        scales, units = getattr(weight, name), getattr(weight, unit)
        if scales is not None:
            parts[name] = scales[:, groups]
        if units is not None:  # each becomes the unit of one group
            repeated = units.repeat_interleave(scales.shape[1] // units.shape[1], dim=1)
            parts[unit] = repeated[:, groups]
    there = {
        name: part.contiguous().view(getattr(weight, name).dtype) for name, part in parts.items()
    }
    return replace(weight, **there)


def _joined(one: Dense | Quantised, other: Dense | Quantised) -> Dense | Quantised | None:
    """Join two weights into one weight of their type; None if type, scheme or order differ."""
    if isinstance(one, Dense) or isinstance(other, Dense):
        alike = isinstance(one, Dense) and isinstance(other, Dense)
    else:
        alike = one.scheme == other.scheme and same(one.order, other.order)
    if not alike:
        return None
    mine, others = dict(_fields(one)), dict(_fields(other))
    if mine.keys() != others.keys():
        return None
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in mine.items():
        beside = others[name]
        if tensor.dtype != beside.dtype or tensor.shape[1:] != beside.shape[1:]:
            return None
        both = (_bytes(tensor), _bytes(beside))
        parts[name] = tensor if name == "order" else torch.cat(both).view(tensor.dtype)
    return replace(one, **parts)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether two orders of columns are equal."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _fields(part: Dense | Quantised) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in asdict(part).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return eight-bit floats as bytes, since torch lacks most operations for eight-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
