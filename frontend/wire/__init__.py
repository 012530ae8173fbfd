"""The messages between a program and the gateway.

`protocol` is the specification: every operation, every event, their rules. `errors` are the typed
errors that cross any border of Rootlace, `sockets` moves frames over ZeroMQ. `chat_format` writes
roles the way the served model's template does, and `tool_calls` constrains calls of tools.
`sampling` describes the options of a request. Everything else may import this package, which
imports nothing of Rootlace.
"""
