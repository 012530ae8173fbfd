"""Kernels of decoders and samplers.

`interface` defines a set of kernels; `reference/` is the specification in plain torch, `triton/`
the set for a GPU. `dispatch` chooses a set. `weights` are the factors of products. `native/` is a
decoder's forward pass for a CPU, in C++.

Importing the package alone imports no torch: compiling or finding the native library needs none.
"""
