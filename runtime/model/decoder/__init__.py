"""Compute hidden states and logits from a step's arrays.

`interface` defines what decoders share, and prepares a step. `torch_decoder` computes a step with
the kernel set's operations, `native_decoder` with one call of the C++ library (weights:
`native_weights`). `rope` computes the rotations of positions.
"""
