"""The gateway's end of the engine process; no torch.

`engine_client` has it started, and started again, at its `place`; `child_engine` is such a process,
`pipes` carries the messages; `in_flight` keeps what is under way, `questions` waits for answers.
"""

from rootlace.runtime.engine.client.child_engine import EngineProcessConfig
from rootlace.runtime.engine.client.engine_client import EngineClient

__all__ = ["EngineClient", "EngineProcessConfig"]
