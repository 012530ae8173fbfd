"""A checkpoint on disk.

`folder` says what a user has named as the model, `config` reads what its decoder computes, `files`
has its tensors, `weights` says which of them each part of a layer is made of, `loader` reads them.
"""
