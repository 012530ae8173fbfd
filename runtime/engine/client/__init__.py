"""The gateway's end of the engine process; no torch.

`engine_client` starts the engine, restarts it, sends requests and hands on updates. `child_engine`
is such a process with its pipes. `restarts` keeps requests in flight and finds requests that kill
engines. `cache_orders` repeats pins and forgets to the next engine.
"""

from rootlace.runtime.engine.client.child_engine import EngineProcessConfig
from rootlace.runtime.engine.client.engine_client import EngineClient

__all__ = ["EngineClient", "EngineProcessConfig"]
