"""Logs of the runtime's processes, on standard error: lines for people, or JSON for programs.

What is logged never holds prompts, outputs or keys.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from rootlace.runtime.config import LogConfig

Process = Literal["gateway", "engine"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that the current task works for; the tasks it starts inherit it."""

_TEXT = {
    "gateway": "%(asctime)s %(levelname)s %(name)s: %(message)s",
    "engine": "%(asctime)s {whose} %(levelname)s %(message)s",
}
_LEVELS = {"gateway": "warning", "engine": "info"}
_TOLD = "rootlace.runtime.server.model_texts"
"""What is logged at level info unless a level is asked for: how requests are sampled."""


class JsonFormatter(logging.Formatter):
    """One JSON object per message: `time`, `level`, `process`, `logger`, `message`, in an HTTP
    request `request_id`, and the traceback as `exception`.

    A message may bring more: `log.info(..., extra={"fields": {...}})`. One of several engines says
    which `replica` it is.
    """

    def __init__(self, process: Process, replica: int | None = None) -> None:
        super().__init__()
        self._process = process
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._replica is not None:
            line["replica"] = self._replica
        if current := request_id.get():
            line["request_id"] = current
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def format_in_force() -> Literal["text", "json"]:
    """What `set_up` was told in this process."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(one.formatter, JsonFormatter) for one in handlers) else "text"


def set_up(config: LogConfig, process: Process, replica: int | None = None) -> None:
    """Log what `config` says from now on. Called as the process starts."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter(process, replica))
    else:
        whose = process if replica is None else f"{process} {replica}"
        handler.setFormatter(logging.Formatter(_TEXT[process].format(whose=whose)))
    level = config.log_level or _LEVELS[process]
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(_TOLD).setLevel("NOTSET" if config.log_level else "INFO")
