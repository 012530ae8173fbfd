"""Compilation beside the engine's loop, bounded in time and memory.

    submit -> ordinary lane: threads of this process compile what looks cheap
                 |  costly: see `is_suspicious`
                 v
              quick lane: a trial in the child, for `QUICK_SECONDS` --out of time--> long lane
                 |  the trial succeeds                                                  |
                 v                                                                      v
              compile here, settle the future                                     trial, compile

Sections: sandbox, lanes, service.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, NamedTuple

import msgspec

from rootlace.runtime import processes
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.structured.compiler import KINDS, GrammarCompiler, as_compiled, check_size
from rootlace.runtime.structured.sandbox_child import Setup, Trial, Verdict, compiled
from rootlace.runtime.structured.structural_tag import is_lenient, weakest
from rootlace.wire.errors import InternalError, InvalidConstraint, RootlaceError, ServerUnavailable
from rootlace.wire.protocol import Constraint


def is_suspicious(constraint: Constraint) -> bool:
    """Return whether compiling `constraint` may take long or much memory (see `source`)."""
    return KINDS[constraint.kind].is_suspicious(constraint.source)


# Sandbox ------------------------------------------------------------------------------------------


START_SECONDS = 120.0


class OutOfTime(ServerUnavailable):
    """Error of a constraint whose compile exceeds its time; a later try may succeed."""

    def __init__(self, constraint: Constraint) -> None:
        super().__init__(f"{constraint.kind}: compilation took too long, try again")


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    pipe: Connection[Any, Any]


class Sandbox:
    """Child process that compiles constraints in forks (`sandbox_child`). Thread-safe. The child
    starts at the first trial. A child that does not answer is killed and replaced."""

    def __init__(self, setup: Callable[[], Setup]) -> None:
        self._setup = setup
        self._child: _Child | None = None
        self._ended = False
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        """Lock of `_child` and `_ended`; never held for long."""

    @property
    def pid(self) -> int | None:
        """Return the process id of the child; None without one."""
        child = self._child
        return None if child is None or self._ended else child.process.pid

    def run(self, constraint: Constraint, seconds: float) -> None:
        """Try to compile. Raises InvalidConstraint with the reason, or with the bound of memory.
        Raises OutOfTime if that takes more than `seconds` of a processor."""
        with contextlib.ExitStack() as pipe:
            with self._sending:
                child = self._child if self._child is not None else self._start()
                ours, theirs = Pipe(duplex=False)
                pipe.callback(ours.close)
                with theirs, self._killing(child, OutOfTime(constraint)):
                    child.pipe.send_bytes(msgspec.msgpack.encode(Trial(constraint, seconds)))
                    send_handle(child.pipe, theirs.fileno(), child.process.pid)
            with self._killing(child, OutOfTime(constraint)):
                # The child answers long before this time, unless it was suspended.
                verdict = _receive(ours, 10 + 10 * seconds)
        if verdict.out_of_time:
            raise OutOfTime(constraint)
        if verdict.error:
            raise InvalidConstraint(verdict.error)

    def close(self) -> None:
        """End the child, even during a trial, and start no other child. Callable from any
        thread."""
        with self._lock:
            self._ended = True
            if self._child is not None:
                _end(self._child.process)

    def _start(self) -> _Child:
        setup = self._setup()
        ours, theirs = Pipe()
        with self._lock, theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(ours.close)
            if self._ended:
                raise ServerUnavailable(STOPPING)
            command = processes.child_command("rootlace.runtime.structured.sandbox_child")
            # Output of libraries goes to standard error.
            process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=2, start_new_session=True
            )
            child = self._child = _Child(process, ours)
            unless_started.pop_all()
        with self._killing(child, InternalError("the sandbox of constraints did not start")):
            ours.send_bytes(msgspec.msgpack.encode(setup))
            _receive(ours, START_SECONDS)
        return child

    @contextlib.contextmanager
    def _killing(self, child: _Child, error: RootlaceError) -> Any:
        """Kill a child that hangs or has ended, so that the next trial starts another."""
        try:
            yield
        except (EOFError, OSError):  # TimeoutError is an OSError
            with self._lock:
                if self._child is child:
                    # The pipe closes with the last thread that uses it: another file may get its
                    # number at once.
                    self._child = None
                    _end(child.process)
            try:
                raise error from None
            finally:
                del error  # the error knows this frame: a cycle would keep the pipe open


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group of the child: the child and its forks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _receive(pipe: Connection[Any, Any], seconds: float) -> Verdict:
    """Receive a verdict. Raises TimeoutError after `seconds`, and EOFError or OSError if the pipe
    is closed."""
    if not pipe.poll(seconds):
        raise TimeoutError
    return msgspec.msgpack.decode(pipe.recv_bytes(), type=Verdict)


# Lanes --------------------------------------------------------------------------------------------


TICK_SECONDS = 0.5


@dataclass(eq=False)
class _Job:
    constraint: Constraint
    clients: list[str]
    """Clients that asked for the constraint, at least one."""
    future: Future[Grammar] = field(default_factory=Future)
    lane: _Lane | None = None
    """The lane in which the job waits or runs; None before its first lane."""
    started: float | None = None
    """Processor time of the worker's thread when the bounded part of the job began."""


class _Lane:
    """Queue with `threads` daemon threads that call `work(job)`; started at the first job.

    The jobs of one client run in order; clients take turns, job by job. A job of several clients
    runs at the first turn of one of them. A job that computes for more than `seconds` after its
    start is handed to `overdue`, on another thread. A new thread takes the place of the thread that
    runs such a job. Neither function may raise.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[_Job], None],
        threads: int = 1,
        overdue: Callable[[_Job], None] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self._name = name
        self._threads = threads
        self._work = work
        self._overdue = overdue
        self._seconds = seconds
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Waiting jobs by client; the client in turn comes first."""
        self._running: dict[threading.Thread, _Job] = {}
        self._changed = threading.Condition()
        self._started = False
        self._closed = False

    def put(self, job: _Job) -> bool:
        """Queue the job for its clients; return False if the lane is closed."""
        with self._changed:
            if self._closed:
                return False
            for client in job.clients:
                self._queues.setdefault(client, deque()).append(job)
            if not self._started:
                self._started = True
                for _ in range(self._threads):
                    self._spawn(self._loop)
                if self._overdue is not None:
                    self._spawn(self._watch)
            self._changed.notify_all()
            return True

    def join(self, job: _Job, client: str) -> None:
        """Queue the waiting job for another client, and add the client to `job.clients`."""
        with self._changed:
            if any(job in queue for queue in self._queues.values()):
                self._queues.setdefault(client, deque()).append(job)

    def close(self) -> set[_Job]:
        """Refuse further jobs. Return the waiting jobs, and the jobs that run on regardless."""
        with self._changed:
            self._closed = True
            left = {job for queue in self._queues.values() for job in queue}
            self._queues.clear()
            self._changed.notify_all()
            return left | set(self._running.values())

    def _spawn(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=self._name, daemon=True).start()

    def _loop(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while not self._queues and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._running[me] = self._take()
                self._changed.notify_all()
            self._work(job)
            with self._changed:
                if self._running.pop(me, None) is None:
                    return  # another thread has taken the place of this one

    def _take(self) -> _Job:
        first = next(iter(self._queues))
        job = self._queues[first][0]
        self._queues.move_to_end(first)
        for client, queue in list(self._queues.items()):
            if job in queue:
                queue.remove(job)
                if not queue:
                    del self._queues[client]
        return job

    def _watch(self) -> None:
        assert self._overdue is not None
        while True:
            with self._changed:
                if self._closed:
                    return
                self._changed.wait(TICK_SECONDS if self._running else None)
                late = {
                    thread: job
                    for thread, job in self._running.items()
                    if job.started is not None
                    and _thread_time(thread) - job.started > self._seconds
                }
                for thread in late:
                    del self._running[thread]
                    self._spawn(self._loop)
            for job in late.values():
                self._overdue(job)


def _thread_time(thread: threading.Thread) -> float:
    """Return the value of `time.thread_time` in a running thread, in seconds."""
    assert thread.ident is not None
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0  # this system has no such clock: no job is ever overdue
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


# Service ------------------------------------------------------------------------------------------


MAX_REMEMBERED_FAILURES = 256
QUICK_SECONDS = 0.25
"""Processor seconds of a trial in the quick lane; a longer trial moves to the long lane."""
STOPPING = "the runtime is stopping"


class CompileService:
    """Service that compiles constraints for the engine. Thread-safe.

    `config.compile_threads` threads compile ordinary constraints. Constraints that look costly are
    tried in the sandbox first, where time and memory end with a process: neither the engine nor an
    ordinary constraint waits. A trial that is not done after `QUICK_SECONDS` is repeated behind
    other long ones, so no quick trial waits for it. An ordinary constraint that turns out to be
    slow fails at the same bound, and another thread takes the place of the stuck one. All times are
    processor time, so a busy machine changes nothing. Failures are remembered, unless time ran out.
    """

    def __init__(self, compiler: GrammarCompiler, config: ConstraintConfig) -> None:
        """Make the service. Raises msgspec.ValidationError if a value of `config` is out of its
        range."""
        self._config = msgspec.convert(msgspec.to_builtins(config), ConstraintConfig)
        self.compiler = compiler
        self._lock = threading.Lock()
        self._pending: dict[Constraint, _Job] = {}
        self._failed: OrderedDict[bytes, str] = OrderedDict()
        """Map from digest of a constraint (its source may be long) to the reason of the failed
        compile."""
        self._sandbox = Sandbox(self._setup)
        self._ordinary = _Lane(
            *("compile", self._run, max(config.compile_threads, 1)),
            overdue=lambda job: self._fail(job, OutOfTime(job.constraint)),
            seconds=config.compile_seconds,
        )
        self._quick = _Lane("compile-quick", self._run)
        self._long = _Lane("compile-long", self._run)

    @property
    def sandbox_pid(self) -> int | None:
        """Return the process id of the sandbox's child; None without one."""
        return self._sandbox.pid

    def submit(self, constraint: Constraint, client: str = "") -> Future[Grammar]:
        """Return the future grammar of a constraint.

        Clients take turns. Clients that ask for the same constraint share one future, and none
        waits longer than alone. The future fails with InvalidConstraint if the constraint cannot be
        enforced or is beyond its bounds, and cannot be cancelled. A worker's thread calls the
        callbacks of the future.
        """
        constraint = as_compiled(constraint)
        with self._lock:
            job = self._pending.get(constraint)
            if job is not None:
                if client not in job.clients:
                    job.clients.append(client)
                    if job.lane is not None:
                        job.lane.join(job, client)
                return job.future
            job = self._pending[constraint] = _Job(constraint, [client])
            job.future.set_running_or_notify_cancel()
        known = self._known(constraint)
        if known is not None and not is_lenient(constraint):
            self._settle(job, known)
        else:
            self._put(self._ordinary, job)
        return job.future

    def close(self) -> None:
        """End the child process; unfinished compiles fail with ServerUnavailable."""
        for lane in (self._ordinary, self._quick, self._long):
            for job in lane.close():
                self._settle(job, ServerUnavailable(STOPPING))
        self._sandbox.close()

    def _known(self, constraint: Constraint) -> InvalidConstraint | None:
        """Return the known reason why the constraint does not compile; None if none is known."""
        try:
            check_size(constraint, self._config)
        except InvalidConstraint as error:
            return error
        with self._lock:
            known = self._failed.get(_digest(constraint)) if self._failed else None
        return None if known is None else InvalidConstraint(known)

    def _put(self, lane: _Lane, job: _Job) -> None:
        with self._lock:  # a client that joins between two lanes counts too
            job.lane = lane
            taken = lane.put(job)
        if not taken:
            self._settle(job, ServerUnavailable(STOPPING))

    # ------------------------------------------------------------ in the workers

    def _run(self, job: _Job) -> None:
        """Run the job for its lane, and settle the job or put it into the next lane."""
        constraint, config = job.constraint, self._config
        try:
            if job.lane is self._ordinary:
                if (known := self._known(constraint)) is not None:
                    raise known
                job.started = time.thread_time()
                # outlines-core builds all of its index at once, and holds the interpreter.
                if config.backend == "outlines_core" or is_suspicious(constraint):
                    self._put(self._quick, job)
                    return
            else:
                seconds = config.compile_seconds
                quick = job.lane is self._quick
                self._sandbox.run(constraint, min(QUICK_SECONDS, seconds) if quick else seconds)
            self._settle(job, compiled(self.compiler.compile, constraint, config))
        except OutOfTime as error:
            if job.lane is self._quick:
                self._put(self._long, job)
            else:
                self._fail(job, error)
        except InvalidConstraint as error:
            self._remember(job, error)
            self._fail(job, error)
        except Exception as error:
            self._settle(job, error)

    def _remember(self, job: _Job, error: Exception) -> None:
        with self._lock:
            self._failed[_digest(job.constraint)] = str(error)
            if len(self._failed) > MAX_REMEMBERED_FAILURES:
                self._failed.popitem(last=False)

    def _fail(self, job: _Job, error: Exception) -> None:
        """End the job with the error or, if a lenient part is at fault, compile without that
        part."""
        weaker = weakest(job.constraint)
        if weaker is None:
            self._settle(job, error)
            return
        if isinstance(error, OutOfTime):  # once is enough
            self._remember(job, error)

        def settle(left: Future[Grammar]) -> None:
            error = left.exception()
            self._settle(job, error if isinstance(error, Exception) else left.result())

        self.submit(weaker, job.clients[0]).add_done_callback(settle)

    def _settle(self, job: _Job, result: Grammar | Exception) -> None:
        with self._lock:
            if self._pending.get(job.constraint) is not job:
                return  # the job was given up, or the service is closed
            del self._pending[job.constraint]
        if isinstance(result, Exception):
            if isinstance(result, RootlaceError):  # other errors name their place
                # Its frames know the job, and so the future: a reference cycle.
                result.__traceback__ = result.__context__ = None
            job.future.set_exception(result)
        else:
            job.future.set_result(result)

    def _setup(self) -> Setup:
        vocabulary = self.compiler.vocabulary
        return Setup(
            self._config,
            vocabulary.size,
            list(vocabulary.eos_token_ids),
            vocabulary.tokenizer_json,
            self.compiler.documents,
        )


def _digest(constraint: Constraint) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(constraint)).digest()
