"""Whole steps: launched, sampled, collected.

`runner` is the executor that the engine has. `plain_steps` computes where it launches (a CPU);
`device_steps` runs beside the host (a GPU): `staging` has the device and its captured
graphs, and lays inputs and results out.
"""
