"""The model families: what each of them computes, stated once.

`spec` is the vocabulary: a `ModelSpec` says everything about a decoder that decides its numbers.
A family is a function from the keys of `config.json` to a spec, in the file of its kin, and found
by being there (`table`); `reading` has what families share. Loader and decoders read the spec and
nothing else; a decoder lists the values that it can compute and refuses all others by name.
"""
