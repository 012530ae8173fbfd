"""The parent's end of `trial`: one child process, killed and replaced when a trial exceeds it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

from rootlace.runtime import processes
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.service.trial import Setup, Trial, Verdict
from rootlace.wire.errors import InternalError, InvalidConstraint, ServerUnavailable
from rootlace.wire.protocol import Constraint

START_SECONDS = 120.0


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

    def run(self, constraint: Constraint, seconds: float) -> None:
        """Raises InvalidConstraint with the reason, or the bound, if it does not compile, and
        OutOfTime where that takes more than `seconds` of a processor."""
        child = self._child if self._child is not None else self._start()
        try:
            # The child answers long before that, unless somebody has suspended it.
            verdict = _ask(child, Trial(constraint, seconds), 10 + 10 * seconds)
        except (EOFError, OSError):
            self._kill()
            raise OutOfTime(constraint) from None
        if verdict.exceeded == "time":
            raise OutOfTime(constraint)
        if verdict.exceeded == "memory":
            raise too_much_memory(constraint, self._config)
        if verdict.error:
            raise InvalidConstraint(verdict.error)

    def close(self) -> None:
        """End the child, whatever it is doing, and start no other. From any thread."""
        with self._lock:
            self._ended = True
            if self._child is not None:
                _end(self._child.process)

    def _kill(self) -> None:
        """The next trial starts another child."""
        with self._lock:
            child, self._child = self._child, None
        assert child is not None
        _end(child.process)
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
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=2, start_new_session=True
            )
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


class OutOfTime(ServerUnavailable):
    """Compiling took longer than it may. That is no fault of the constraint's, and not remembered
    as one."""

    def __init__(self, constraint: Constraint) -> None:
        super().__init__(f"{constraint.kind}: compilation took too long, try again")


def too_much_memory(constraint: Constraint, config: ConstraintConfig) -> InvalidConstraint:
    memory = f"{config.compile_memory_bytes >> 20} MiB of memory (compile_memory_bytes)"
    return InvalidConstraint(f"{constraint.kind}: compiling it takes more than {memory}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and what it has forked, which is its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ask(child: _Child, message: Setup | Trial, seconds: float) -> Verdict:
    """The child's answer. Raises TimeoutError if there is none for `seconds`, and EOFError or
    OSError if the child has ended."""
    child.pipe.send_bytes(msgspec.msgpack.encode(message))
    if not child.pipe.poll(seconds):
        raise TimeoutError
    return msgspec.msgpack.decode(child.pipe.recv_bytes(), type=Verdict)
