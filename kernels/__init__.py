"""What decoders and samplers are computed with.

`interface` says what a set of kernels does, `reference/` does it in plain torch and is the
specification, `triton/` on a GPU; `dispatch` chooses between them. `weights` are what products
multiply by. `native/` is a whole decoder's forward pass for a CPU, in C++.
"""

from rootlace.kernels.dispatch import kernels_for
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
]
