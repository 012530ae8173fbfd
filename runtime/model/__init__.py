"""Turn a step's plan into tokens: the executor.

`families` specify models, `checkpoint` reads configuration and weights, `decoder` computes hidden
states and logits. `kv_pool` has the memory of the cache, `sampler` picks tokens, `executor` runs
whole steps on a CPU or a GPU.
"""
