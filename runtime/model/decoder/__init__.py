"""From a step's numbers to hidden states and logits.

`interface` says what all decoders have in common, and prepares a step. `torch_decoder` computes it
with the kernel set's operations, `native_decoder` in one call of the C++ library (weights:
`native_weights`); `rope` has the rotations of positions.
"""
