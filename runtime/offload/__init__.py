"""Where blocks are kept below the pool: files of slots on a disk, pinned main memory beside a GPU.

`folder` finds the folder for a model, `slot_file` is the form of its files, `slot_store` reads and
writes them beside the loop by a `reader` and a `writer`, `host` is main memory, `handed` what other
engines hand over. What is kept where is `cache.tier`'s business.
"""
