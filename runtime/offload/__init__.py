"""Stores of blocks below the pool: files on disk, host memory beside a GPU, other engines.

`disk_store` finds a model's folder and holds its files. `slot_store` reads and writes slots on
threads beside the loop, those of other engines among them, and has the store in host memory.
`cache.tier` decides which blocks are saved.
"""
