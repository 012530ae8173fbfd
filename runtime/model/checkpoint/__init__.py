"""Read checkpoints from disk.

`source` finds the model that a user names; `config` reads the specification of the decoder. `files`
maps the tensors, `weights` lists the tensors of each part of a layer, `loader` reads the parts.
"""
