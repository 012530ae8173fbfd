"""What all models of a server share: who may ask, whether it is stopping, and what it counts."""

from __future__ import annotations

from rootlace.runtime.config import GatewayConfig
from rootlace.runtime.gateway.drain import Drain
from rootlace.runtime.gateway.keys.keys import Keys
from rootlace.runtime.gateway.metrics import Metrics
from rootlace.runtime.gateway.spans import Spans


class House:
    """`metrics` are those of requests and keys; each model has its own of what it computes."""

    def __init__(self, config: GatewayConfig) -> None:
        self.metrics = Metrics()
        self.keys = Keys(config.api_key, config.keys_file, self.metrics.key_used)
        self.drain = Drain()
        self.spans = Spans.to(config.otlp)
