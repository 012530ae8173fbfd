"""Compiling constraints: which backend, cached, bounded in time and memory, beside the loop.

`compiler` is the entry, `build` chooses the backend, `cache` shares what was compiled,
`compilation` runs beside the engine's loop and sends costly ones (`suspicion`) to a child process
first (`trial`, `trial_process`).
"""
