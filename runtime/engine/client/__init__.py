"""The gateway's end of the engine process; no torch.

`engine_client` starts the engine, restarts it, sends requests and hands on updates. `child_engine`
is such a process, `process_config` what it is started with, all that an engine
imports from here. `restarts` keeps requests in flight and finds requests that kill engines.
`cache_orders` repeats pins and forgets to the next engine.
"""
