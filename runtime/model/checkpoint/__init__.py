"""A checkpoint on disk.

`config` reads what the folder says of the model, `files` has its tensors, `weights` says which of
them each part of a layer is made of, `loader` reads them.
"""
