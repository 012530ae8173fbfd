"""Running a program.

In the order of a run: `function` (the decorator), `batch` (one program or many, here, in a thread
or as a task), `run` (what its branches have in common), `branch` (what is appended and read) and
`remote_branch` (what is sent for it), `operations` (what comes back). `recording` keeps what a run
did and when; `engine` generates without a program.
"""
