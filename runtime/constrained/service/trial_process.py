"""The parent's end of `trial`: one child process, killed and replaced when a trial exceeds it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

from rootlace.runtime import processes
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.service.trial import OUT_OF_TIME, Setup, Verdict
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

    def run(self, constraint: Constraint) -> None:
        """Raises InvalidConstraint with the reason, or the bound, if it does not compile."""
        child = self._child if self._child is not None else self._start()
        try:
            # The child ends itself long before that, unless somebody has suspended it.
            verdict = _ask(child, constraint, 10 + 4 * self._config.compile_seconds)
        except (EOFError, OSError) as error:
            status = self._kill()
            if isinstance(error, TimeoutError) or -status in OUT_OF_TIME:
                raise too_much(constraint, self._config, "compile_seconds") from None
            # It ran out of memory where nothing could catch that.
            raise too_much(constraint, self._config, "compile_memory_bytes") from None
        if verdict.out_of_memory:
            # What the allocator holds on to must not count against the next trial.
            self._kill()
            raise too_much(constraint, self._config, "compile_memory_bytes")
        if verdict.error:
            raise InvalidConstraint(verdict.error)

    def close(self) -> None:
        """End the child, whatever it is doing, and start no other. From any thread."""
        with self._lock:
            self._ended = True
            if self._child is not None:
                self._child.process.kill()
                self._child.process.wait()

    def _kill(self) -> int:
        """The next trial starts another child. Returns this one's exit status."""
        with self._lock:
            child, self._child = self._child, None
        assert child is not None
        child.process.kill()
        status = child.process.wait()
        child.pipe.close()
        return status

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


def too_much(constraint: Constraint, config: ConstraintConfig, bound: str) -> InvalidConstraint:
    """Compiling takes more than `bound` ("compile_seconds" or "compile_memory_bytes")."""
    time, memory = f"{config.compile_seconds:g} seconds", config.compile_memory_bytes >> 20
    much = time if bound == "compile_seconds" else f"{memory} MiB of memory"
    return InvalidConstraint(f"{constraint.kind}: compiling it takes more than {much} ({bound})")


def _ask(child: _Child, message: Setup | Constraint, seconds: float) -> Verdict:
    """The child's answer. Raises TimeoutError if there is none for `seconds`, and EOFError or
    OSError if the child has ended."""
    child.pipe.send_bytes(msgspec.msgpack.encode(message))
    if not child.pipe.poll(seconds):
        raise TimeoutError
    return msgspec.msgpack.decode(child.pipe.recv_bytes(), type=Verdict)
