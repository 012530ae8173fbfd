"""Running a program.

In the order of a run: `function` (the decorator), `execution` (here, in a thread or as a task),
`run` (what its branches have in common), `branch` (what is appended) and `remote_branch` (what is
sent for it), `operations` (what comes back), `reader` and `cursor` (reading it, whole or as it
comes). `batch` runs one program on many arguments, which start from a shared `prefix` and may be
kept in a `checkpoint`; a run may have a `budget` of tokens; `engine` generates without a program.
"""
