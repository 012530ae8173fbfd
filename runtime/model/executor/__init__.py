"""Whole steps: launched, sampled, collected.

`runner` is the executor that the engine has. `plain_steps` computes where it launches (a CPU);
`device_steps` runs beside the host (a GPU), with `staging`, `graphs` and `results` around it.
"""
