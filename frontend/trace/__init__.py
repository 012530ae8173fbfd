"""Finding a program's graph without a model.

`tracer` runs the program's Python with symbols in place of values; `graph` is what it finds. It is
one of the two interpreters of the language and knows nothing of the other, `rootlace.program`,
which uses it to find the text that the programs of a batch share.
"""
