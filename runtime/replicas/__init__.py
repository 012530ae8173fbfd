"""Several engine processes of one model, which the gateway uses as if they were one; no torch.

`replicas` starts them, lets another one go on when one dies, and makes one of several answers.
`dispatch` sends requests where they cost least (`rootlace.runtime.routing`), and notices what was
lost of what engines say of their caches. `handover` has some of them compute prompts for the
others; `remote` has places for engines of other machines.
"""
