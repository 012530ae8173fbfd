"""Examination of the machine: its hardware and kernels, and a model's needs and ceilings on it.

`ceilings` reads the system's figures, measures, and counts the work and reads of a step. `report`
chooses the kernels, puts a model and the ceilings together, and lists the models present.
"""
