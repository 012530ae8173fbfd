"""Models of other families, run by transformers' own modules with our cache and attention.

`installed` finds out, without importing transformers, whether there are such modules. `recording`
runs a model without weights to see what its layers ask of `attention`, and `reading` makes a spec
of that. `loading` gets the weights, `decoder` computes steps and `head` logits; `agreement`
finds out before the first request whether steps of ours compute what transformers does.
"""
