"""What travels between a program and the gateway, and how.

`protocol` is the specification: every operation, every event, their rules. `errors` are the typed
errors that cross any border of Rootlace, `sockets` moves frames over ZeroMQ, and `chat_format`
writes roles the way the served model's template does. Everything else may import this package; it
imports nothing of Rootlace.
"""
