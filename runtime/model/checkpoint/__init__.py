"""A checkpoint on disk.

`source` finds the model that a user names, `config` reads what its decoder computes, `files` has
its tensors, `weights` says which of them each part of a layer is made of, `loader` reads them.
"""
