"""What decoders and samplers are computed with.

`interface` says what a set of kernels does, `reference/` does it in plain torch and is the
specification, `triton/` on a GPU; `dispatch` chooses between them. `weights` are what products
multiply by. `native/` is a whole decoder's forward pass for a CPU, in C++.

Importing the package alone imports no torch: who compiles or finds the native library needs none.
"""
