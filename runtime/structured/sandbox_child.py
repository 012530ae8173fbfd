"""Child process that compiles costly constraints first; `sandbox.Sandbox` starts it.

    parent --Setup, then Trial and a pipe--> child --fork--> keeper --fork--> worker
                      pipe <------------------- Verdict of the worker, or of the keeper

The child reads the vocabulary once. Each worker compiles one constraint, and the operating system
ends a worker beyond its address space or time. A worker's waiting time for a processor does not
count, so the bound does not depend on other programs. But an alarm ends the worker some time after
the bound. Then the worker's keeper gives the verdict.

Standard input is one end of a `multiprocessing.Pipe`, with messages in MessagePack. When the input
ends, the parent has ended, and the child ends with all its forks.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import msgspec
import psutil

from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.contracts.matcher import Grammar
from rootlace.runtime.structured.compiler import GrammarCompiler
from rootlace.runtime.structured.vocabulary.vocabulary import Vocabulary
from rootlace.wire.errors import InvalidConstraint, RootlaceError
from rootlace.wire.protocol import Constraint

WARM_UP = (Constraint("regex", "a"), Constraint("ebnf", 'root ::= "a" root "b" | "c"'))

OUT_OF_TIME = (signal.SIGPROF, signal.SIGALRM)
"""Signals that end a worker after too much computing, or too much waiting."""


class Setup(msgspec.Struct, frozen=True):
    """First message to the child: all that it needs to compile as its parent would."""

    config: ConstraintConfig
    size: int
    eos_token_ids: list[int]
    tokenizer_json: bytes
    documents: dict[str, object]


class Trial(msgspec.Struct, frozen=True):
    """Later message to the child; a pipe for the verdict follows."""

    constraint: Constraint
    seconds: float


class Verdict(msgspec.Struct, frozen=True):
    """Answer of a worker: `error` is the reason why the constraint does not compile; "" if it
    does."""

    error: str = ""
    out_of_time: bool = False


def compiled(
    compile: Callable[[Constraint], Grammar], constraint: Constraint, config: ConstraintConfig
) -> Grammar:
    """Return the grammar, with its first mask, which may take longer than the rest. Raises
    InvalidConstraint."""
    try:
        grammar = compile(constraint)
        matcher = grammar.matcher()
        matcher.allowed_mask()
    except RecursionError:
        raise InvalidConstraint(f"{constraint.kind}: nested too deeply") from None
    except MemoryError:
        raise too_much_memory(constraint, config) from None
    if error := matcher.error():
        raise InvalidConstraint(f"{constraint.kind}: {error}")
    return grammar


def too_much_memory(constraint: Constraint, config: ConstraintConfig) -> InvalidConstraint:
    memory = f"{config.compile_memory_bytes >> 20} MiB of memory (compile_memory_bytes)"
    return InvalidConstraint(f"{constraint.kind}: compiling it takes more than {memory}")


def main() -> None:
    """Serve until the input ends, or a message does not fit into memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no status behind
    for number in OUT_OF_TIME:
        signal.signal(number, signal.SIG_DFL)  # ends the process, whatever it is doing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUT_OF_TIME)  # the parent may have blocked them
    parent: Connection[Any, Any] = Connection(0)
    setup = msgspec.msgpack.decode(parent.recv_bytes(), type=Setup)
    compiler = GrammarCompiler(
        Vocabulary(zlib.decompress(setup.tokenizer_json).decode(), setup.size, setup.eos_token_ids),
        config=setup.config,
        documents=setup.documents,
    )
    for constraint in WARM_UP:  # lasting tables are built now
        _attempt(compiler, constraint)
    os.nice(5)  # the engine's steps go first
    parent.send_bytes(msgspec.msgpack.encode(Verdict()))
    try:
        while True:
            trial = msgspec.msgpack.decode(parent.recv_bytes(), type=Trial)
            answer: Connection[Any, Any] = Connection(recv_handle(parent))
            if not os.fork():
                parent.close()
                _keep(compiler, trial, answer)
            answer.close()
    finally:
        os.killpg(0, signal.SIGKILL)  # the group that the parent made for the child


def _keep(compiler: GrammarCompiler, trial: Trial, answer: Connection[Any, Any]) -> None:
    """Try a constraint in a worker, and answer for a worker that was ended. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker = os.fork()
    if not worker:
        _limit_memory(compiler.config.compile_memory_bytes)
        _set_alarms(trial.seconds, 8 * trial.seconds + 1)
        verdict = _attempt(compiler, trial.constraint)
        _set_alarms(0, 0)
        answer.send_bytes(msgspec.msgpack.encode(verdict))
        os._exit(0)
    _, status = os.waitpid(worker, 0)
    if status:  # without memory a worker may also end where no handler could catch it
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in OUT_OF_TIME
        error = str(too_much_memory(trial.constraint, compiler.config))
        answer.send_bytes(msgspec.msgpack.encode(Verdict("" if late else error, late)))
    os._exit(0)


def _attempt(compiler: GrammarCompiler, constraint: Constraint) -> Verdict:
    try:
        compiled(compiler.build, constraint, compiler.config)
    except RootlaceError as error:
        return Verdict(str(error))
    return Verdict()


def _set_alarms(computing: float, in_all: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, computing)
    signal.setitimer(signal.ITIMER_REAL, in_all)


def _limit_memory(extra: int) -> None:
    """Bound the address space to its present size plus `extra` bytes (where the system can)."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = psutil.Process().memory_info().vms + extra
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
