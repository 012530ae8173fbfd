"""What decoders and samplers are computed with.

`interface` says what a set of kernels does, `reference/` does it in plain torch and is the
specification, `triton/` on a GPU; `dispatch` chooses between them. `weights` are what products
multiply by. `native/` is a whole decoder's forward pass for a CPU, in C++.

Importing the package alone imports no torch: who compiles or finds the native library needs none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rootlace.kernels.dispatch import kernels_for, with_reference
    from rootlace.kernels.interface import AttentionBatch, KernelSet
    from rootlace.kernels.weights import Dense, Quantised, Scheme, Stacked, Weight

__all__ = [
    "AttentionBatch",
    "Dense",
    "KernelSet",
    "Quantised",
    "Scheme",
    "Stacked",
    "Weight",
    "kernels_for",
    "with_reference",
]

_MODULES = {
    "kernels_for": "dispatch",
    "with_reference": "dispatch",
    "AttentionBatch": "interface",
    "KernelSet": "interface",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'weights')}"), name)
