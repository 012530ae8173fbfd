"""Messages between a program and the server.

`protocol` is the specification: every operation, every event, their rules. `errors` are the typed
errors that cross any border of Rootlace, `sockets` moves frames over ZeroMQ. `chat_format` writes
roles as the served model's template does, and `tool_calls` constrains calls of tools. `sampling`
describes the options of a request. All other packages may import this package, which imports
nothing of Rootlace.
"""
