"""The server process: programs and HTTP clients on one side, the engine on the other.

`app` starts everything, `programs` speaks ZeroMQ with programs, and `http` answers HTTP. Both let a
`sequence` grow, whose text the `tokenizer` turns into ids and back.
"""
