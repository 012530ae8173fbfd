"""What crosses the borders of the runtime's parts: data and protocols, no behaviour.

`messages` travel between gateway and engine; `request` is what the scheduler is asked for and
`update` what it tells; `plan` is a step on its way to the executor, and its result; `matcher` is
what a constraint answers. Numbers only: no torch, no sockets.
"""
