"""Which types of a GGUF file's tensors are read, and what the weights in them are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rootlace.runtime.model.checkpoint.expected import FLOATS, Expected
from rootlace.runtime.model.checkpoint.quantised.quantisation import ALL, Quantisation, Rule
from rootlace.runtime.model.gguf.file import GgufFile
from rootlace.wire.errors import UnsupportedModel

CODES = {
    "Q8_0": "int8",
    "Q4_0": "int4",
    "Q4_1": "uint4",
    "Q5_0": "int8",
    "Q5_1": "int8",
    "Q4_K": "uint4",
    "Q5_K": "int8",
    "Q6_K": "int8",
    "IQ4_NL": "nl4",
    "IQ4_XS": "nl4",
    "MXFP4": "e2m1",
}
"""Types of blocks that are read, by the codes that they are read as."""


@dataclass(frozen=True)
class Ggml:
    """A weight in blocks of a `type`. See `checkpoint.quantised.layouts.Layout`."""

    type: str

    @property
    def codes(self) -> str:
        return CODES[self.type]

    def stores(self, module: str, types: Mapping[str, str]) -> bool:
        return types.get(f"{module}.weight") == self.type

    def why_not(self, rows: int, columns: int) -> str | None:
        return None  # the file has been asked already

    def needed(self, rows: int, columns: int) -> dict[str, Expected]:
        return {".weight": Expected(((rows, columns),), frozenset({self.type}))}

    def possible(self, rows: int, columns: int) -> dict[str, Expected]:
        return {}


def quantisation_of(file: GgufFile) -> Quantisation | None:
    """How the file stores its weights: each by its type. None: all as floats."""
    found = {tensor.type.name for tensor in file.tensors.values()} - FLOATS
    layouts = tuple(Ggml(name) for name in CODES if name in found)
    return (
        Quantisation(f"GGUF: {', '.join(sorted(found))}", (Rule(ALL, layouts),)) if found else None
    )


def check_types(file: GgufFile) -> None:
    """Raises `UnsupportedModel`, saying what to take instead, for weights that are not read."""
    for tensor in file.tensors.values():
        name, shape = tensor.type.name, list(tensor.shape)
        if name not in FLOATS and (name not in CODES or len(shape) not in (2, 3)):
            known = ", ".join((*sorted(FLOATS), *CODES))
            raise UnsupportedModel(
                f"{tensor.file}: {tensor.name} {shape} is stored as {name}, which is not read; "
                f"take a file of the model with other types, such as Q4_K_M (read: {known})"
            )
