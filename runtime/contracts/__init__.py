"""What crosses the borders of the runtime's parts: data and protocols, no behaviour.

A `request` goes from gateway to scheduler and an `update` comes back, both as `messages` between
the two processes. A `plan` is a step on its way to the executor, and its result. A `matcher` is one
request's place in its constraint. Numbers only: no torch, no sockets.
"""
