"""The model families: what each of them computes, stated once.

`spec` is the vocabulary: a `ModelSpec` says everything about a decoder that decides its numbers.
Each family has one file, found by being here (`table`), which reads a spec from the family's
`config.json` with the help of `reading`. Loader and decoders read the spec and nothing else; a
decoder says which values of it it can compute (`support`) and refuses all others by name.
"""
