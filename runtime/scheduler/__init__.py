"""What is computed when: iteration-level scheduling over the radix tree. No torch.

`scheduler` is the whole: `add`, `abort`, `plan`, `commit`. It composes small parts: `limits` (what
can be served at all), `waiting` (the queue, with `patience` and `prompt_order`), `running` and `kv`
(sequences and their blocks), `prefill` (who computes what of a prompt), `plan_builder` and
`decode_rows` (a step's arrays), `intake` and `outcome` (what tokens mean, and when they are sent).
"""
