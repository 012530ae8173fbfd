"""Compilation beside the engine's loop, bounded in time and memory."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.service.build import check_size
from rootlace.runtime.constrained.service.compiler import GrammarCompiler
from rootlace.runtime.constrained.service.lane import Lane
from rootlace.runtime.constrained.service.suspicion import is_suspicious
from rootlace.runtime.constrained.service.trial import Setup
from rootlace.runtime.constrained.service.trial_process import TrialProcess, too_much
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.wire.errors import InvalidConstraint, ServerUnavailable
from rootlace.wire.protocol import Constraint

MAX_REMEMBERED_FAILURES = 256


@dataclass(eq=False)
class _Compilation:
    constraint: Constraint
    future: Future[Grammar] = field(default_factory=Future)
    started: float | None = None


class CompileService:
    """Compiles constraints for the engine. Thread-safe.

    Ordinary constraints are compiled by `config.compile_threads` threads. Suspicious ones (see
    `suspicion`) go to a thread of their own, which compiles each in a child process first, where
    time and memory end with the process: neither the engine nor an ordinary constraint waits.
    Should an ordinary one turn out to be slow after all, it fails at the same bound, and another
    thread takes the place of the one that is stuck with it. Failures are remembered, too.
    """

    def __init__(self, compiler: Callable[[], GrammarCompiler], config: ConstraintConfig) -> None:
        """`compiler` is called by a worker, at the first constraint: a compiler reads the whole
        vocabulary. Raises msgspec.ValidationError where a value of `config` is out of its range."""
        self._config = msgspec.convert(msgspec.to_builtins(config), ConstraintConfig)
        self._compiler: GrammarCompiler | None = None
        self._make = compiler
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[Constraint, Future[Grammar]] = {}
        self._failed: OrderedDict[bytes, str] = OrderedDict()
        self._trial = TrialProcess(self._setup, config)
        self._ordinary: Lane[_Compilation] = Lane(
            "compile",
            max(config.compile_threads, 1),
            self._compile,
            self._give_up,
            config.compile_seconds,
        )
        self._suspicious: Lane[_Compilation] = Lane("compile-suspicious", 1, self._try)

    @property
    def trial_pid(self) -> int | None:
        """The child process in which suspicious constraints are tried, if there is one now."""
        return self._trial.pid

    def cached(self, constraint: Constraint) -> Grammar | None:
        """The grammar, if it is compiled already."""
        return self._compiler.cached(constraint) if self._compiler is not None else None

    def submit(self, constraint: Constraint) -> Future[Grammar]:
        """The grammar, soon; those who ask for the same constraint meanwhile share one future.

        It fails with InvalidConstraint where the constraint cannot be enforced or is beyond its
        bounds, and cannot be cancelled. Its callbacks are called by a worker's thread.
        """
        job = _Compilation(msgspec.structs.replace(constraint, jump_forward="canonical"))
        job.future.set_running_or_notify_cancel()
        with self._lock:
            pending = self._pending.get(job.constraint)
            if pending is not None:
                return pending
            self._pending[job.constraint] = job.future
            known = self._failed.get(_digest(job.constraint)) if self._failed else None
        try:
            check_size(job.constraint, self._config)
        except InvalidConstraint as error:
            known = str(error)
        if known is not None:
            self._settle(job, InvalidConstraint(known))
        elif not self._ordinary.put(job):
            self._settle(job, ServerUnavailable("the runtime is stopping"))
        return job.future

    def close(self) -> None:
        """End the child process; what is not compiled yet fails with ServerUnavailable."""
        for job in (*self._ordinary.close(), *self._suspicious.close()):
            self._settle(job, ServerUnavailable("the runtime is stopping"))
        self._trial.close()

    # ------------------------------------------------------------ in the workers

    def _compile(self, job: _Compilation) -> None:
        try:
            compiler = self._made()
        except Exception as error:
            self._settle(job, error)
            return
        job.started = time.monotonic()
        # outlines-core builds all of its index at once, and does not let go of the interpreter.
        if self._config.backend == "outlines_core" or is_suspicious(job.constraint):
            if not self._suspicious.put(job):
                self._settle(job, ServerUnavailable("the runtime is stopping"))
        else:
            self._finish(job, lambda: compiler.compile(job.constraint))

    def _try(self, job: _Compilation) -> None:
        def compiled() -> Grammar:
            self._trial.run(job.constraint)
            return self._made().compile(job.constraint)

        self._finish(job, compiled)

    def _finish(self, job: _Compilation, compiled: Callable[[], Grammar]) -> None:
        try:
            self._settle(job, compiled())
        except InvalidConstraint as error:
            self._remember(job, error)
        except RecursionError:
            self._remember(job, InvalidConstraint(f"{job.constraint.kind}: nested too deeply"))
        except MemoryError:
            self._remember(job, too_much(job.constraint, self._config, "compile_memory_bytes"))
        except Exception as error:
            self._settle(job, error)

    def _give_up(self, job: _Compilation) -> None:
        self._remember(job, too_much(job.constraint, self._config, "compile_seconds"))

    def _remember(self, job: _Compilation, error: InvalidConstraint) -> None:
        with self._lock:
            self._failed[_digest(job.constraint)] = str(error)
            if len(self._failed) > MAX_REMEMBERED_FAILURES:
                self._failed.popitem(last=False)
        self._settle(job, error)

    def _settle(self, job: _Compilation, result: Grammar | Exception) -> None:
        with self._lock:
            if self._pending.get(job.constraint) is not job.future:
                return  # it was given up, or the service is closed
            del self._pending[job.constraint]
        if isinstance(result, Exception):
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
