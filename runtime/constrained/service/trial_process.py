"""The parent's end of `trial`: one child process, killed and replaced when a trial exceeds it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import psutil

from rootlace.runtime import processes
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.service.trial import Setup, Verdict
from rootlace.wire.errors import InternalError, InvalidConstraint, ServerUnavailable
from rootlace.wire.protocol import Constraint

START_SECONDS = 120.0
LOOK_SECONDS = 0.1
"""How often a child that does not answer is looked at."""


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]


class TrialProcess:
    """Compiles in a child that is started at the first trial. `run` is for one thread only."""

    def __init__(self, setup: Callable[[], Setup], config: ConstraintConfig) -> None:
        self._setup = setup
        self._config = config
        self._child: _Child | None = None
        self._ended = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The child's, if there is one now."""
        child = self._child
        return None if child is None or self._ended else child.process.pid

    def run(self, constraint: Constraint) -> None:
        """Raises InvalidConstraint with the reason, or the bound, if it does not compile."""
        child = self._child if self._child is not None else self._start()
        try:
            verdict = _ask(child, constraint, self._config.compile_seconds)
        except TimeoutError:
            self._kill()
            raise InvalidConstraint(too_slow(constraint, self._config)) from None
        except (EOFError, OSError):
            self._kill()  # it ran out of memory where nothing could catch that
            raise InvalidConstraint(too_large(constraint, self._config)) from None
        if verdict.out_of_memory:
            # What the allocator holds on to must not count against the next trial.
            self._kill()
            raise InvalidConstraint(too_large(constraint, self._config))
        if verdict.error:
            raise InvalidConstraint(verdict.error)

    def close(self) -> None:
        """End the child, whatever it is doing, and start no other. From any thread."""
        with self._lock:
            self._ended = True
            if self._child is not None:
                self._child.process.kill()
                self._child.process.wait()

    def _kill(self) -> None:
        """The next trial starts another child."""
        with self._lock:
            child, self._child = self._child, None
        assert child is not None
        child.process.kill()
        child.process.wait()
        child.pipe.close()

    def _start(self) -> _Child:
        setup = self._setup()
        ours, theirs = Pipe()
        with self._lock, theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            if self._ended:
                raise ServerUnavailable("the runtime is stopping")
            command = processes.child_command("rootlace.runtime.constrained.service.trial")
            # What a library may print goes to standard error.
            process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=2)
            child = self._child = _Child(process, ours)
            unless_started.pop_all()
        try:
            _ask(child, setup, START_SECONDS)
        except (EOFError, OSError) as error:  # TimeoutError is an OSError
            self._kill()
            raise InternalError(
                f"the process that tries constraints did not start: {error!r}"
            ) from None
        return child


def too_slow(constraint: Constraint, config: ConstraintConfig) -> str:
    return (
        f"{constraint.kind}: compiling it takes more than {config.compile_seconds:g} seconds "
        "(compile_seconds)"
    )


def too_large(constraint: Constraint, config: ConstraintConfig) -> str:
    return (
        f"{constraint.kind}: compiling it takes more than {config.compile_memory_bytes >> 20} MiB "
        "of memory (compile_memory_bytes)"
    )


_WORKING = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


class _Spent:
    """The seconds that a child has spent computing or asleep, as measured at each look.

    Time that it waits for a processor does not count: how long a constraint takes must not depend
    on what else the machine does.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._process = psutil.Process(child.pid)
        self._computed = self._cpu()
        self._slept = 0.0
        self._looked = time.monotonic()

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def seconds(self) -> float:
        """Raises EOFError if the child has ended."""
        now = time.monotonic()
        try:
            if self._process.status() not in _WORKING:
                self._slept += now - self._looked
            computed = self._cpu() - self._computed
        except psutil.NoSuchProcess:
            raise EOFError from None
        self._looked = now
        return computed + self._slept


def _ask(child: _Child, message: Setup | Constraint, seconds: float) -> Verdict:
    """The child's answer. Raises TimeoutError if it spends more than `seconds` on it, computing or
    asleep, and EOFError or OSError if it has ended."""
    try:
        spent = _Spent(child.process)
    except psutil.NoSuchProcess:
        raise EOFError from None
    child.pipe.send_bytes(msgspec.msgpack.encode(message))
    while not child.pipe.poll(LOOK_SECONDS):
        if spent.seconds() > seconds:
            raise TimeoutError
    return msgspec.msgpack.decode(child.pipe.recv_bytes(), type=Verdict)
