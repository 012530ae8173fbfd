"""Run models of other families by transformers' own modules, with Rootlace's cache and attention.

`checkpoint.config` finds such modules without importing transformers. `config` runs a model without
weights to record its layers' attention, and makes a spec of the records. `loading` reads the
weights and computes steps. Before the first request `loading` compares steps with transformers'
results.
"""
