"""How Rootlace's processes hold on to each other, and what they log.

A child is started with its configuration as the first line (JSON) of its standard input, and that
input then stays open for as long as the parent lives. However the parent ends, `kill -9` included,
the operating system closes the pipe, the child reads end-of-file and exits: nothing is left behind,
on any platform, without polling.

Logs go to standard error: lines for people, or JSON for programs. What is logged never holds
prompts, outputs or keys.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from rootlace.runtime.config import LogConfig

T = TypeVar("T")

_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
"""Variables for the waiting of an OpenMP team's threads, in the different runtimes."""
DESCRIPTORS = 65_536
_PR_SET_PDEATHSIG = 1
"""Constant of <linux/prctl.h>."""


def read_config(stream: BinaryIO, config_type: type[T]) -> T:
    """Return the configuration a parent wrote as the first line of `stream`. Raises
    msgspec.DecodeError or msgspec.ValidationError where it is not one."""
    return msgspec.json.decode(stream.readline(), type=config_type)


def write_config(config: object) -> bytes:
    """Return the line that `read_config` reads."""
    return msgspec.json.encode(config) + b"\n"


def call_when_parent_ends(stream: BinaryIO, callback: Callable[[], None]) -> threading.Thread:
    """Call `callback` from a daemon thread once `stream` (a child's standard input) is closed.

    Reads the file descriptor directly: a thread blocked inside Python's buffered reader holds that
    reader's lock, and the interpreter aborts at exit when it cannot get it.
    """
    descriptor = stream.fileno()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 4096):
                pass
        callback()

    thread = threading.Thread(target=wait, name="parent-watch", daemon=True)
    thread.start()
    return thread


def end_with_parent() -> None:
    """On Linux, have the system kill this process when the thread that started it ends: a stopped
    or hanging process reads no end-of-file. Call it first of all."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def give_way() -> None:
    """On Linux, never take a core from a computing process before its turn has ended. This process
    has many short turns, and all threads of a computation wait for the one that lost its core.
    Children are to call `compete`. Does nothing where the user has chosen another scheduling, or
    the system refuses this one."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def compete() -> None:
    """Undo the effect of a parent's `give_way` on this process."""
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_BATCH:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def take_descriptors() -> None:
    """Raise the bound of descriptors to `DESCRIPTORS`, or as far as the system allows: each
    connection is one, and a login's default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptors() -> int:
    """Return the bound of descriptors of this process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return DESCRIPTORS if limit == resource.RLIM_INFINITY else limit


def child_command(module: str) -> list[str]:
    """Return the command line of a child that runs `module`."""
    return [sys.executable, "-m", module]


def compute_environment() -> dict[str, str]:
    """Return the environment of a child that computes on many threads.

    Threads of an OpenMP team that wait spin for a while, in case work comes soon. Where another
    program wants a core, spinning threads keep the working ones from it: with a busy neighbour a
    forward pass took 10 to 100 times as long. So they are told to sleep, unless the environment
    says otherwise already.
    """
    environment = dict(os.environ)
    if not _WAITING.intersection(environment):
        environment["OMP_WAIT_POLICY"] = "passive"
    return environment


def give_back_memory() -> None:
    """Return free memory of malloc's arenas to the system, where the C library can. Reading a
    vocabulary leaves tens of megabytes of pages that glibc keeps otherwise. Takes milliseconds, and
    stops threads that allocate meanwhile."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def new_memory() -> int:
    """Return a file descriptor, for children to inherit, of nameless memory that grows by writes.
    The memory is gone with the last process that has it, however it ends. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rootlace-blocks")
    with tempfile.TemporaryFile(prefix="rootlace-") as file:
        return os.dup(file.fileno())


class SocketFolder:
    """A private folder (mode 0700) for ipc sockets; removed with `remove`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rootlace-"))

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


Process = Literal["gateway", "engine"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that the current task works for; the tasks it starts inherit it."""

_TEXT = {
    "gateway": "%(asctime)s %(levelname)s %(name)s: %(message)s",
    "engine": "%(asctime)s {whose} %(levelname)s %(message)s",
}
_LEVELS = {"gateway": "warning", "engine": "info"}
_TOLD = "rootlace.runtime.server.model_texts"
"""Logger whose info messages appear unless a level is asked for: the sampling of requests."""


class JsonFormatter(logging.Formatter):
    """One JSON object per message: `time`, `level`, `process`, `logger`, `message`, in an HTTP
    request `request_id`, and the traceback as `exception`.

    A message may have more fields: `log.info(..., extra={"fields": {...}})`. One of several engines
    names its `replica`.
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
    """Return the format that `set_up_logs` chose in this process."""
    handlers = logging.getLogger().handlers
    return "json" if any(isinstance(one.formatter, JsonFormatter) for one in handlers) else "text"


def set_up_logs(config: LogConfig, process: Process, replica: int | None = None) -> None:
    """Log from now on as `config` sets. Called as the process starts."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter(process, replica))
    else:
        whose = process if replica is None else f"{process} {replica}"
        handler.setFormatter(logging.Formatter(_TEXT[process].format(whose=whose)))
    level = config.log_level or _LEVELS[process]
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(_TOLD).setLevel("NOTSET" if config.log_level else "INFO")
