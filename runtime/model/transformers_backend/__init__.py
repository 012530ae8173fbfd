"""Models of other families, run by transformers' own modules with our cache and attention.

`checkpoint.config` finds out, without importing transformers, whether there are such modules.
`config` runs a model without weights to see what its layers ask of attention, and makes a spec of
that. `loading` gets the weights, computes steps, and checks before the first request that these
steps compute what transformers does.
"""
