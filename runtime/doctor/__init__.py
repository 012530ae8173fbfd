"""What this machine is, which kernels run on it, and what a model would need and reach here.

`ceilings` reads what the system tells, measures, and counts what a step computes and reads;
`report` says which kernels run, puts a model and the ceilings together, and lists what is here.
"""
