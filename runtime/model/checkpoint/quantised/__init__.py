"""Quantised checkpoints, read without making their weights dense.

`methods` reads a `quantization_config`, with a file for each way of writing one, into a
`quantisation`: the `layouts` that modules are stored in. `storage` says which tensors of a file a
module is made of, and `reading` makes a weight of them. All but the last work without torch, so
that what is refused is refused at once.
"""
