"""Branches: growing token sequences and the operations on them.

`gateway` hands out a `session` per client, which takes the client's operations apart; `branch` is
one branch with its queue; `growth` appends without sampling, `generation` and `select` ask the
engine, `sample` is one sample under way; `requests` are engine requests that end together; `core`
is what all sessions share.
"""
