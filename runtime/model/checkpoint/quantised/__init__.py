"""Quantised checkpoints, read without making their weights dense.

`methods` reads a `quantization_config` into a `Quantisation`: the `layouts` that modules are stored
in. `reading` makes weights of the tensors that a layout names. All but `reading` work without
torch, so that a checkpoint which is refused is refused at once.
"""
