"""Which tensors of a checkpoint a module's weight is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rootlace.runtime.model.checkpoint.quantised.layouts import Expected, Layout, Quantisation
from rootlace.wire.errors import UnsupportedModel

PASSED_OVER = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
)
"""What a quantised module may have besides: how its activations were to be quantised."""


@dataclass(frozen=True)
class Storage:
    """The tensors of a checkpoint in `folder`, by name their type, and what its configuration says
    of them."""

    folder: Path
    types: Mapping[str, str]
    quantisation: Quantisation | None

    _found: dict[str, Layout | None] = field(default_factory=dict, init=False, repr=False)
    """What is known of modules: their names are matched once."""

    def layout(self, module: str) -> Layout | None:
        """How the module is stored; None: as it is."""
        if module not in self._found:
            layouts = () if self.quantisation is None else self.quantisation.layouts(module)
            there = (layout for layout in layouts if layout.stores(module, self.types))
            self._found[module] = next(there, None)
        return self._found[module]

    def needed(self, module: str, rows: int, columns: int) -> dict[str, Expected]:
        """The tensors of a module's weight [rows, columns]."""
        layout = self.layout(module)
        if layout is None:
            # GGUF files have a single row as a vector.
            vector = ((columns,),) if rows == 1 else ()
            return {f"{module}.weight": Expected(((rows, columns), *vector))}
        reason = layout.why_not(rows, columns)
        if reason is not None:
            raise self.refusal(f"{module} [{rows}, {columns}] cannot be quantised so: {reason}")
        return {module + name: what for name, what in layout.needed(rows, columns).items()}

    def possible(self, module: str, rows: int, columns: int) -> dict[str, Expected]:
        """Further tensors that are read if they are there.

        A bias is among them, which GPTQ's files have where the model has none: it must be zero.
        """
        layout = self.layout(module)
        if layout is None:
            return {}
        found = {".bias": Expected(((rows,),)), **layout.possible(rows, columns)}
        there = {module + name: what for name, what in found.items()}
        return {name: what for name, what in there.items() if name in self.types}

    def refusal(self, why: str) -> UnsupportedModel:
        """What is wrong with the checkpoint."""
        return UnsupportedModel(f"{self.folder}: {why}")

    def passed_over(self, name: str) -> bool:
        """Whether a tensor says how a module's activations were to be quantised."""
        return self.quantisation is not None and name.endswith(PASSED_OVER)
