"""Run whole steps: launch, sample and collect.

`runner` is the engine's executor. `plain_steps` computes a step at its launch (on a CPU).
`device_steps` runs beside the host (on a GPU): `staging` has the device, captured graphs, and the
layout of inputs and results.
"""
