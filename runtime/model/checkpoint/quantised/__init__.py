"""Read quantised checkpoints without making their weights dense.

`methods` reads a `quantization_config` into a `Quantisation`: the `layouts` of the modules.
`reading` builds weights from the tensors of a layout. All modules but `reading` work without torch,
so that an unsupported checkpoint is refused at once.
"""
