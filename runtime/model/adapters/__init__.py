"""LoRA adapters beside a model: for the rows of a step that ask for one, y += scale B (A x).

`config` reads PEFT's `adapter_config.json`, without torch, and refuses what is not computed here;
`weights` reads the matrices, as the decoder's parts have them; `rows` says which tokens of a step
belong to which adapter.
"""
