"""The gateway's end of the engine process; no torch.

`engine_client` starts the process and restarts it; `in_flight` keeps what is under way, `pipes`
carries the messages, `questions` waits for answers.
"""

from rootlace.runtime.engine.client.engine_client import EngineClient, EngineProcessConfig

__all__ = ["EngineClient", "EngineProcessConfig"]
