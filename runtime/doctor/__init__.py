"""What this machine is, which kernels run on it, and what a model would need and reach here.

`machine` reads what the system tells, `ceilings` measures, `kernel_choice` says which kernels run
and why no better ones, `work` counts what a step computes and reads, `forecast` puts a model and
the ceilings together, `report` is all of it.
"""
