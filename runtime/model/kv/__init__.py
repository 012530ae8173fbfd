"""The memory of the KV cache: its `pool`, its fp8 `scales`, and how large it may be on a GPU."""
