"""Divide a model's layers among several processes, the *ranks* (tensor parallelism).

`shard` defines a rank's part of each layer, `group` the communication of ranks. Rank 0 is the
engine; `ranks` starts the other ranks, and is the program that they run.
"""
