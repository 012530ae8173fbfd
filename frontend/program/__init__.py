"""Running a program.

In the order of a run: `function` (the decorator), `batch` (one program or many, here, in a thread
or as a task), `run` (what its branches have in common, and what each sends), `branch` (what is
appended and read), `operations` (what comes back, and what a run did and when); `engine`
generates without a program.
"""
