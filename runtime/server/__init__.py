"""The gateway process: programs and HTTP clients on one side, the engine on the other.

`app` starts everything, `server` speaks ZeroMQ with programs, `http` answers HTTP; both use the
`branches`, and these use `tokens` to turn text into ids and back.
"""
