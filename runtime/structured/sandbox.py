"""Compilation beside the engine's loop, bounded in time and memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec

from rootlace.runtime import processes
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.lane import Lane
from rootlace.runtime.structured.compiler import KINDS, GrammarCompiler, as_compiled, check_size
from rootlace.runtime.structured.sandbox_child import Setup, Trial, Verdict, make_first_mask
from rootlace.runtime.structured.structural_tag import is_lenient, weakest
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InternalError, InvalidConstraint, RootlaceError, ServerUnavailable
from rootlace.wire.protocol import Constraint


def is_suspicious(constraint: Constraint) -> bool:
    """Whether compiling `constraint` may take long or much memory (see `source`)."""
    return KINDS[constraint.kind].is_suspicious(constraint.source)


# Trial process ------------------------------------------------------------------------------------
#
# The parent's end of `trial`: one child process, killed and replaced when a trial exceeds it.


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
            command = processes.child_command("rootlace.runtime.structured.sandbox_child")
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


# Compilation --------------------------------------------------------------------------------------


MAX_REMEMBERED_FAILURES = 256
QUICK_SECONDS = 0.25
"""A trial that takes longer does not go on ahead of others."""
STOPPING = "the runtime is stopping"


@dataclass(eq=False)
class _Compilation:
    constraint: Constraint
    clients: list[str]
    """Who asked for it, at least one."""
    lane: Lane[_Compilation] | None = None
    """Where it waits, or did."""
    future: Future[Grammar] = field(default_factory=Future)
    started: float | None = None
    takes_long: bool = False
    """Whether a quick trial was not enough."""


class CompileService:
    """Compiles constraints for the engine. Thread-safe.

    Ordinary constraints are compiled by `config.compile_threads` threads. Suspicious ones (see
    `suspicion`) are tried in a child process first, where time and memory end with the process:
    neither the engine nor an ordinary constraint waits. One that is not done after `QUICK_SECONDS`
    is tried anew behind others of its kind, in another child, so no quick one waits for it.
    Should an ordinary one turn out to be slow after all, it fails at the same bound, and another
    thread takes the place of the one that is stuck with it. Time is that of the processor, however
    busy the machine is. Failures are remembered, unless time ran out.
    """

    def __init__(self, compiler: Callable[[], GrammarCompiler], config: ConstraintConfig) -> None:
        """`compiler` is called by a worker, at the first constraint: a compiler reads the whole
        vocabulary. Raises msgspec.ValidationError where a value of `config` is out of its range."""
        self._config = msgspec.convert(msgspec.to_builtins(config), ConstraintConfig)
        self._compiler: GrammarCompiler | None = None
        self._make = compiler
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[Constraint, _Compilation] = {}
        self._failed: OrderedDict[bytes, str] = OrderedDict()
        self._trial, self._long_trial = (TrialProcess(self._setup, config) for _ in range(2))
        self._ordinary: Lane[_Compilation] = Lane(
            "compile",
            max(config.compile_threads, 1),
            self._compile,
            self._give_up,
            config.compile_seconds,
        )
        self._suspicious: Lane[_Compilation] = Lane("compile-suspicious", 1, self._try)
        self._long: Lane[_Compilation] = Lane("compile-long", 1, self._try)

    @property
    def trial_pid(self) -> int | None:
        """The child process in which suspicious constraints are tried, if there is one now."""
        return self._trial.pid

    @property
    def vocabulary(self) -> Vocabulary:
        """That which constraints are compiled for, once one was."""
        assert self._compiler is not None
        return self._compiler.vocabulary

    def cached(self, constraint: Constraint) -> Grammar | None:
        """The grammar, if it is compiled already."""
        return self._compiler.cached(constraint) if self._compiler is not None else None

    def submit(self, constraint: Constraint, client: str = "") -> Future[Grammar]:
        """The grammar, soon; clients take turns, and those who ask for the same share one future,
        for which nobody waits longer than if the others had not asked.

        It fails with InvalidConstraint where the constraint cannot be enforced or is beyond its
        bounds, and cannot be cancelled. Its callbacks are called by a worker's thread.
        """
        job = _Compilation(as_compiled(constraint), [client])
        job.future.set_running_or_notify_cancel()
        with self._lock:
            pending = self._pending.get(job.constraint)
            if pending is not None:
                if client not in pending.clients:
                    pending.clients.append(client)
                    if pending.lane is not None:
                        pending.lane.want(pending, client)
                return pending.future
            self._pending[job.constraint] = job
        known = self._known(job.constraint)
        if known is not None and not is_lenient(job.constraint):
            self._settle(job, known)
        else:
            self._put(self._ordinary, job)
        return job.future

    def _known(self, constraint: Constraint) -> InvalidConstraint | None:
        """What is wrong with it, if that is known already."""
        try:
            check_size(constraint, self._config)
        except InvalidConstraint as error:
            return error
        with self._lock:
            known = self._failed.get(_digest(constraint)) if self._failed else None
        return None if known is None else InvalidConstraint(known)

    def close(self) -> None:
        """End the child process; what is not compiled yet fails with ServerUnavailable."""
        for lane in (self._ordinary, self._suspicious, self._long):
            for job in lane.close():
                self._settle(job, ServerUnavailable(STOPPING))
        self._trial.close()
        self._long_trial.close()

    # ------------------------------------------------------------ in the workers

    def _compile(self, job: _Compilation) -> None:
        try:
            compiler = self._made()
        except Exception as error:
            self._settle(job, error)
            return
        known = self._known(job.constraint)
        if known is not None:
            self._fail(job, known)
            return
        job.started = time.thread_time()
        # outlines-core builds all of its index at once, and does not let go of the interpreter.
        if self._config.backend == "outlines_core" or is_suspicious(job.constraint):
            self._put(self._suspicious, job)
        else:
            self._finish(job, compiler)

    def _put(self, lane: Lane[_Compilation], job: _Compilation) -> None:
        with self._lock:  # between two lanes nobody may miss it
            job.lane = lane
            taken = lane.put(job, job.clients)
        if not taken:
            self._settle(job, ServerUnavailable(STOPPING))

    def _try(self, job: _Compilation) -> None:
        self._finish(job, self._made(), self._long_trial if job.takes_long else self._trial)

    def _finish(
        self, job: _Compilation, compiler: GrammarCompiler, trial: TrialProcess | None = None
    ) -> None:
        """Compile, in a `trial` first if there is one, and settle the job."""
        seconds = self._config.compile_seconds
        try:
            if trial is not None:
                quick = min(QUICK_SECONDS, seconds)
                trial.run(job.constraint, seconds if job.takes_long else quick)
            grammar = compiler.compile(job.constraint)
            make_first_mask(grammar, job.constraint)  # otherwise a step would wait
            self._settle(job, grammar)
        except InvalidConstraint as error:
            self._refuse(job, error)
        except RecursionError:
            self._refuse(job, InvalidConstraint(f"{job.constraint.kind}: nested too deeply"))
        except MemoryError:
            self._refuse(job, too_much_memory(job.constraint, self._config))
        except OutOfTime as error:
            if job.takes_long:
                self._fail(job, error)
            else:
                job.takes_long = True
                self._put(self._long, job)
        except Exception as error:
            self._settle(job, error)

    def _give_up(self, job: _Compilation) -> None:
        self._fail(job, OutOfTime(job.constraint))

    def _refuse(self, job: _Compilation, error: InvalidConstraint) -> None:
        self._remember(job, error)
        self._fail(job, error)

    def _remember(self, job: _Compilation, error: InvalidConstraint) -> None:
        with self._lock:
            self._failed[_digest(job.constraint)] = str(error)
            if len(self._failed) > MAX_REMEMBERED_FAILURES:
                self._failed.popitem(last=False)

    def _fail(self, job: _Compilation, error: Exception) -> None:
        """`job` ends with the error or, where all that could not be compiled of it is lenient, with
        what is left without that."""
        weaker = weakest(job.constraint)
        if weaker is None:
            self._settle(job, error)
            return
        if isinstance(error, OutOfTime):  # once is enough
            self._remember(job, InvalidConstraint(str(error)))

        def settle(left: Future[Grammar]) -> None:
            error = left.exception()
            self._settle(job, error if isinstance(error, Exception) else left.result())

        self.submit(weaker, job.clients[0]).add_done_callback(settle)

    def _settle(self, job: _Compilation, result: Grammar | Exception) -> None:
        with self._lock:
            if self._pending.get(job.constraint) is not job:
                return  # it was given up, or the service is closed
            del self._pending[job.constraint]
        if isinstance(result, Exception):
            if isinstance(
                result, RootlaceError
            ):  # what goes wrong otherwise is told with its place
                # Its frames know the job, and so the future: it would refer to itself.
                result.__traceback__ = result.__context__ = None
            job.future.set_exception(result)
        else:
            job.future.set_result(result)

    def _made(self) -> GrammarCompiler:
        with self._making:
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler

    def _setup(self) -> Setup:
        compiler = self._made()
        vocabulary = compiler.vocabulary
        return Setup(
            self._config,
            vocabulary.size,
            list(vocabulary.eos_token_ids),
            vocabulary.tokenizer_json,
            compiler.documents,
        )


def _digest(constraint: Constraint) -> bytes:
    """Stands for a constraint that failed: its source may be long."""
    return hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()
