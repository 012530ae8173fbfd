"""Gateway's end of the engine process; no torch.

`engine_client` starts the engine, restarts it, sends requests and hands on updates. `child_engine`
is the engine as a child process, and `process_config` its configuration, the only import of an
engine from here. `restarts` keeps requests in flight and finds requests that kill engines.
`cache_orders` repeats pins and forgets to the next engine.
"""
