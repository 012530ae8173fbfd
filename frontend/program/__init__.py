"""Running of programs.

In the order of a run: `function` (the decorator) and `batch` (one program or many). Then `run`
(state shared by a run's branches, and sending) and `branch` (appending and reading). Then
`operations` (results, and the record of a run). `engine` generates without a program.
"""
