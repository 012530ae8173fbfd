"""Tensor parallelism: a model's layers divided among several processes, the *ranks*.

`shard` says which part of each layer a rank has, `group` is what ranks tell each other. Rank 0 is
the engine; `leader` starts the others, and has what they run.
"""
