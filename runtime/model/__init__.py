"""The executor: what turns a step's plan into tokens.

`families` say what models compute, `checkpoint` reads configuration and weights, `decoder` computes
hidden states and logits, `kv_pool` is the memory of the cache, `sampler` picks tokens, `executor`
runs whole steps on a CPU or a GPU.
"""
