"""Blocks below the pool, on a disk or in main memory: what is saved there, and read back.

`levels` is what there is, `saving` what goes down, `fetching` (of `fetch`es) what comes up again,
and `tiering` both of it for the scheduler.
"""
