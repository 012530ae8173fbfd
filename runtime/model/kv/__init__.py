"""The memory of the KV cache: its `pool`, how large it may be, and its fp8 `scales`."""
