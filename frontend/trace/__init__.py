"""Finding a program's graph without a model.

`tracer` runs the program's Python with symbols in place of values; `graph` is what it finds.
"""
