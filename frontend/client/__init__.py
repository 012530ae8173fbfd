"""A program's side of the wire: connections, and the runtimes they lead to.

`channel` says what programs need of a connection; `connection` is one with a socket and the one
I/O thread, `outbox` the operations that wait for company in a frame and `line` the socket.
`completion` is how threads and coroutines wait for a result, `answer` the result of one operation;
`cached_text` computes text before it is asked for. `endpoint` is a runtime that is already running,
`runtime` one that is started as a child process, and `default` the one that programs use when they
are not told. For what is no Rootlace server (`openai_backend`, the tests' backends), `machine` does
a client's operations in their order, and `local_channel` makes a channel of it.
"""
