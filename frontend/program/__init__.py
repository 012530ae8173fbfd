"""Running a program: `@function`, its state, and the branches that the state stands for.

In the order of a run: `function` (the decorator), `run` (one run and its end), `state` (what the
program sees), `branch` (the operations it sends), `variables` (what it may read), `transcript`
(its text), `fork`, `cursor` (streaming). `batch` runs one program on many arguments and shares
their common `prefix`; `engine` generates without a program.
"""
