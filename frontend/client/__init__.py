"""A program's side of the wire: connections, and the runtimes they lead to.

`channel` says what programs need of a connection, and how they wait for results; for what is no
Rootlace server (`services`, `rootlace.testing`) it does a client's operations in their order.
`connection` is one with a socket and the one I/O thread. `endpoint` is a runtime that is already
running, and the default one; `runtime` is one that is started as a child process.
"""
