"""From a step's numbers to hidden states and logits.

`step_input` prepares a step; `torch_decoder` computes it with the kernel set's operations,
`native_decoder` in one call of the C++ library (weights: `native_weights`); `rope` has the
rotations of positions. `interface` says what all of them have in common.
"""
