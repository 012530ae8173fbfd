"""A program's side of the wire: connections, and the runtimes behind them.

`channel` defines connections for programs and how programs wait for results. For services that are
no Rootlace server (`services`, `rootlace.testing`), `channel` runs a client's operations in their
order. `connection` has a socket and the one I/O thread. `endpoint` is a running runtime, and the
default one; `runtime` starts a runtime as a child process.
"""
