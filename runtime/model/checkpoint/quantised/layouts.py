"""Describe the layouts of a quantised weight W [rows, columns] in a file: names, shapes and types.
Names of a layout's tensors are endings behind the module's name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from rootlace.wire.errors import UnsupportedModel

# Expected -----------------------------------------------------------------------------------------
#
# Define the allowed shapes and types of a checkpoint's tensors.


Shape = tuple[int, ...]

FLOATS = frozenset({"F32", "F16", "BF16", "F64"})
"""Types of weights that are not quantised, by safetensors' names."""
SIZES = {"I32": 4, "I64": 8}
"""Bytes of a number of the other types, where more than one."""


class Expected(msgspec.Struct, frozen=True):
    """Allowed shapes and types of a tensor."""

    shapes: tuple[Shape, ...]
    types: frozenset[str] = FLOATS

    def num_bytes(self, itemsize: int) -> int:
        """Return the largest size in bytes, with `itemsize` bytes for each float."""
        size = itemsize if self.types == FLOATS else max(SIZES.get(one, 1) for one in self.types)
        return max(map(math.prod, self.shapes)) * size


# Layouts ------------------------------------------------------------------------------------------


I8, I32, U8 = frozenset({"I8"}), frozenset({"I32"}), frozenset({"U8"})
FP8 = frozenset({"F8_E4M3"})
EXPONENTS = frozenset({"U8", "F8_E8M0"})
"""Types of scales that are powers of two: byte b is 2^(b - 127)."""


class Layout(msgspec.Struct, frozen=True):
    """Way to store a weight."""

    marker: ClassVar[str]
    """Ending of the codes' name: a checkpoint with such a tensor has this layout."""

    @property
    def codes(self) -> str:
        """Codes of the weight: a key of `rootlace.kernels.weights.CODES`."""
        raise NotImplementedError

    def stores(self, module: str, types: Mapping[str, str]) -> bool:
        """Tell whether a checkpoint has a module in this layout. `types`: all tensors' types."""
        return module + self.marker in types

    def why_not(self, rows: int, columns: int) -> str | None:
        """Explain why no weight of this shape can have this layout; None if one can."""
        return None

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        """List the tensors of a weight."""
        raise NotImplementedError

    def possible(self, rows: int, columns: int) -> dict[str, Expected]:
        """List further tensors that a weight may have."""
        return {}


class Block(msgspec.Struct, frozen=True):
    """Size of the blocks of weights that share a scale, in rows and columns; None: all."""

    rows: int | None = None
    columns: int | None = None

    def shapes(self, rows: int, columns: int) -> tuple[Shape, ...]:
        """List the shapes that scales may have: a matrix, or fewer axes where sizes are 1."""
        high, wide = blocks(rows, self.rows), blocks(columns, self.columns)
        if (high, wide) == (1, 1):
            return (), (1,), (1, 1)
        return ((high, 1), (high,)) if wide == 1 else ((high, wide),)


def blocks(count: int, block: int | None) -> int:
    """Count the blocks in `count`; the last one may be smaller."""
    return 1 if block is None else -(-count // block)


class Numbers(Layout, frozen=True):
    """Matrix of numbers of eight bits, with scales: floats or powers of two. `block` None: one
    scale for all weights or one for each row, as the file has. Integers may have zero points."""

    numbers: Literal["int8", "fp8_e4m3"]
    block: Block | None
    scale: str = ".weight_scale"
    symmetric: bool = True

    @property
    def codes(self) -> str:
        return self.numbers

    def stores(self, module: str, types: Mapping[str, str]) -> bool:
        return types.get(f"{module}.weight", "F32") not in FLOATS and module + self.scale in types

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        return {
            ".weight": Expected(((rows, columns),), I8 if self.codes == "int8" else FP8),
            self.scale: Expected(self._shapes(rows, columns), FLOATS | EXPONENTS),
            **({} if self.symmetric else self._zeros(rows, columns)),
        }

    def possible(self, rows: int, columns: int) -> dict[str, Expected]:
        return self._zeros(rows, columns)

    def _zeros(self, rows: int, columns: int) -> dict[str, Expected]:
        return {".weight_zero_point": Expected(self._shapes(rows, columns), I8 | FLOATS | FP8)}

    def _shapes(self, rows: int, columns: int) -> tuple[Shape, ...]:
        if self.block is not None:
            return self.block.shapes(rows, columns)
        return Block().shapes(rows, columns) + Block(rows=1).shapes(rows, columns)


COLUMN_GROUPS = (".weight_g_idx", ".g_idx")
"""Tensors of a module with the group of each column."""


class PackedInts(Layout, frozen=True):
    """Integers of four or eight bits in compressed-tensors' packing. 32 / bits neighbours of a row
    share an int32, the first in the lowest bits, each plus half its range. Zero points of
    neighbouring rows share one, too; old files have them as bytes. With `.weight_g_idx`, column i
    is of group weight_g_idx[i]."""

    marker: ClassVar[str] = ".weight_packed"
    bits: Literal[4, 8]
    block: Block
    symmetric: bool = True

    @property
    def codes(self) -> str:
        return f"int{self.bits}"

    def why_not(self, rows: int, columns: int) -> str | None:
        return _not_whole(8 // self.bits, columns)

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        return {
            ".weight_packed": Expected(((rows, self._words(columns)),), I32),
            ".weight_scale": Expected(self.block.shapes(rows, columns)),
            **({} if self.symmetric else self._zeros(rows, columns)),
        }

    def possible(self, rows: int, columns: int) -> dict[str, Expected]:
        return {
            ".weight_shape": Expected(((2,),), frozenset({"I64", "I32"})),
            ".weight_g_idx": Expected(((columns,),), I32),
            **self._zeros(rows, columns),
        }

    def _zeros(self, rows: int, columns: int) -> dict[str, Expected]:
        shapes = (self.packed_zeros(rows, columns), *self.block.shapes(rows, columns))
        return {".weight_zero_point": Expected(shapes, I32 | I8)}

    def packed_zeros(self, rows: int, columns: int) -> Shape:
        """Return the shape of packed zero points."""
        return self._words(rows), blocks(columns, self.block.columns)

    def _words(self, count: int) -> int:
        return -(-count * self.bits // 32)


class Gptq(Layout, frozen=True):
    """Integers in GPTQ's packing: 32 / bits neighbours of a row share an int32, the first in the
    lowest bits. Zero points of neighbouring rows share an int32. `minus_one`: the stored number is
    the zero point less one. Column i is of group g_idx[i]."""

    marker: ClassVar[str] = ".qweight"
    bits: Literal[4, 8]
    group: int | None
    minus_one: bool

    @property
    def codes(self) -> str:
        return f"int{self.bits}"

    def why_not(self, rows: int, columns: int) -> str | None:
        return _not_whole(32 // self.bits, rows, columns)

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        words, groups = 32 // self.bits, blocks(columns, self.group)
        return {
            ".qweight": Expected(((columns // words, rows),), I32),
            ".qzeros": Expected(((groups, rows // words),), I32),
            ".scales": Expected(((groups, rows),)),
        }

    def possible(self, rows: int, columns: int) -> dict[str, Expected]:
        return {".g_idx": Expected(((columns,),), I32)}


class Awq(Layout, frozen=True):
    """Integers of four bits in AWQ's packing, version `gemm`. Eight neighbours of a column share an
    int32, in the order 0 2 4 6 1 3 5 7 from the lowest bits. Zero points are packed likewise, and
    all 8 if the weights are `symmetric`."""

    marker: ClassVar[str] = ".qweight"
    codes: ClassVar[str] = "int4"
    group: int | None
    symmetric: bool = False

    def why_not(self, rows: int, columns: int) -> str | None:
        return _not_whole(8, rows) or _not_whole(2, columns)

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        groups = blocks(columns, self.group)
        return {
            ".qweight": Expected(((columns, rows // 8),), I32),
            ".qzeros": Expected(((groups, rows // 8),), I32),
            ".scales": Expected(((groups, rows),)),
        }


class Floats4(Layout, frozen=True):
    """Floats of four bits: two neighbours of a row in a byte, the first in the lower half. Groups
    have scales: powers of two in MXFP4; in NVFP4 floats of eight bits, divided by one float for all
    weights."""

    marker: ClassVar[str] = ".weight_packed"
    codes: ClassVar[str] = "e2m1"
    form: Literal["mxfp4", "nvfp4"]

    @property
    def group(self) -> int:
        return 32 if self.form == "mxfp4" else 16

    def why_not(self, rows: int, columns: int) -> str | None:
        return _not_whole(self.group, columns)

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        groups = ((rows, columns // self.group),)
        found = {".weight_packed": Expected(((rows, columns // 2),), U8)}
        if self.form == "mxfp4":
            return found | {".weight_scale": Expected(groups, EXPONENTS)}
        return found | {
            ".weight_scale": Expected(groups, FP8),
            ".weight_global_scale": Expected(((), (1,))),
        }


class Blocks(Layout, frozen=True):
    """MXFP4 as gpt-oss stores weights: `Floats4` with an axis for groups, and without ".weight"."""

    marker: ClassVar[str] = "_blocks"
    codes: ClassVar[str] = "e2m1"

    def why_not(self, rows: int, columns: int) -> str | None:
        return _not_whole(32, columns)

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        return {
            "_blocks": Expected(((rows, columns // 32, 16),), U8),
            "_scales": Expected(((rows, columns // 32),), EXPONENTS),
        }


def _not_whole(count: int, *sizes: int) -> str | None:
    wrong = next((size for size in sizes if size % count), None)
    return None if wrong is None else f"{wrong} is not a multiple of {count}"


# Quantisation -------------------------------------------------------------------------------------
#
# Describe how a checkpoint's modules are stored, as the configuration says.


class Rule(msgspec.Struct, frozen=True):
    """Storage of the modules whose names match `pattern`: the first of `layouts` that the file has;
    dense if the file has none."""

    pattern: re.Pattern[str]
    layouts: tuple[Layout, ...] = ()


ALL = re.compile("")
"""Pattern of every module."""


class Quantisation(msgspec.Struct, frozen=True):
    """Storage of a checkpoint's modules. `method`: the name of the quantisation method. A module
    follows the first rule whose pattern matches its name. `remarks` are for the log."""

    method: str
    rules: tuple[Rule, ...]
    remarks: tuple[str, ...] = ()

    @property
    def codes(self) -> frozenset[str]:
        """Codes that weights may have: keys of `rootlace.kernels.weights.CODES`."""
        return frozenset(layout.codes for rule in self.rules for layout in rule.layouts)

    def layouts(self, module: str) -> Sequence[Layout]:
        """List the layouts that the module may be stored in."""
        return next((rule.layouts for rule in self.rules if rule.pattern.match(module)), ())


# Storage ------------------------------------------------------------------------------------------
#
# Find the tensors of a module's weight in a checkpoint.


PASSED_OVER = (
    *(".input_scale", ".input_zero_point", ".input_global_scale"),
    *(".activation_scale", ".output_scale", ".output_zero_point"),
)
"""Tensors about the quantisation of a module's activations; nothing reads these tensors."""


@dataclass(frozen=True)
class Storage:
    """Storage of the checkpoint in `folder`: each tensor's type by name, and the configuration's
    quantisation."""

    folder: Path
    types: Mapping[str, str]
    quantisation: Quantisation | None

    _found: dict[str, Layout | None] = field(default_factory=dict, init=False, repr=False)
    """Layouts of modules already looked up: each name is matched once."""

    def layout(self, module: str) -> Layout | None:
        """Return the module's layout; None: not quantised."""
        if module not in self._found:
            layouts = () if self.quantisation is None else self.quantisation.layouts(module)
            there = (layout for layout in layouts if layout.stores(module, self.types))
            self._found[module] = next(there, None)
        return self._found[module]

    def needed(self, module: str, rows: int, columns: int) -> dict[str, Expected]:
        """List the tensors of a module's weight [rows, columns]."""
        layout = self.layout(module)
        if layout is None:
            # GGUF files store a single row as a vector.
            vector = ((columns,),) if rows == 1 else ()
            return {f"{module}.weight": Expected(((rows, columns), *vector))}
        reason = layout.why_not(rows, columns)
        if reason is not None:
            raise self.refusal(f"{module} [{rows}, {columns}] cannot be quantised so: {reason}")
        return {module + name: what for name, what in layout.needed(rows, columns).items()}

    def possible(self, module: str, rows: int, columns: int) -> dict[str, Expected]:
        """List the optional tensors that the checkpoint has. A bias is among them, in GPTQ's files
        also where the model has none: such a bias must be zero."""
        layout = self.layout(module)
        if layout is None:
            return {}
        found = {".bias": Expected(((rows,),)), **layout.possible(rows, columns)}
        there = {module + name: what for name, what in found.items()}
        return {name: what for name, what in there.items() if name in self.types}

    def refusal(self, why: str) -> UnsupportedModel:
        """Build the error about this checkpoint."""
        return UnsupportedModel(f"{self.folder}: {why}")

    def passed_over(self, name: str) -> bool:
        """Tell whether a tensor describes the quantisation of a module's activations."""
        return self.quantisation is not None and name.endswith(PASSED_OVER)
