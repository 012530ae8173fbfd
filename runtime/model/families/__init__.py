"""Define the model families: each family's computation, stated once.

`spec` has the vocabulary: a `ModelSpec` states everything about a decoder that decides its numbers.
A family is a function from the keys of `config.json` to a spec; `table` finds all families, and
`reading` has their common parts. Loader and decoders read the spec alone. A decoder lists the
values that it can compute and refuses all others by name.
"""
