"""The child process in which suspicious constraints are compiled first; `trial_process` starts it.

It gets the vocabulary once, then constraints one at a time, and says of each whether it compiles.
Each is compiled in a fork of its own, whose address space and time are bounded by the operating
system, which ends it beyond. Time that it waits for a processor does not count: how long a
constraint takes must not depend on what else the machine does. But an alarm ends it some time after
the bound, whatever it waits for.

Its standard input is one end of a `multiprocessing.Pipe`: messages in MessagePack go both ways.
When it ends, the parent has, and the child exits with its fork.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, Literal

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
"""The signals that end a fork when it has computed, or waited, for too long."""


class Setup(msgspec.Struct, frozen=True):
    """The first message to the child: what it needs to compile as its parent would."""

    config: ConstraintConfig
    size: int
    eos_token_ids: list[int]
    tokenizer_json: str
    documents: dict[str, object]


class Trial(msgspec.Struct, frozen=True):
    """Any later message to the child."""

    constraint: Constraint
    seconds: float


class Verdict(msgspec.Struct, frozen=True):
    """The child's answer: `error` is why the constraint does not compile, empty if it does."""

    error: str = ""
    exceeded: Literal["", "time", "memory"] = ""


# ---------------------------------------------------------------- the child


def main() -> int:
    """Exit status 0 when the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in OUT_OF_TIME:
        signal.signal(number, signal.SIG_DFL)  # ends the process, whatever it is doing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUT_OF_TIME)  # the parent may have blocked them
    parent: Connection[Any, Any] = Connection(0)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    forks: list[int] = []
    threading.Thread(target=_read_all, args=(parent, messages, forks), daemon=True).start()
    setup = msgspec.msgpack.decode(messages.get(), type=Setup)
    compiler = GrammarCompiler(
        Vocabulary(setup.tokenizer_json, setup.size, setup.eos_token_ids),
        config=setup.config,
        documents=setup.documents,
    )
    for constraint in WARM_UP:  # what is built once is built now
        attempt(compiler, constraint)
    os.nice(5)  # the engine's steps go first
    parent.send_bytes(msgspec.msgpack.encode(Verdict()))
    while True:
        trial = msgspec.msgpack.decode(messages.get(), type=Trial)
        fork = os.fork()
        if not fork:
            _limit_memory(setup.config.compile_memory_bytes)
            _set_alarms(trial.seconds, 8 * trial.seconds + 1)
            verdict = attempt(compiler, trial.constraint)
            _set_alarms(0, 0)
            parent.send_bytes(msgspec.msgpack.encode(verdict))
            os._exit(0)
        forks.append(fork)
        _, status = os.waitpid(forks[0], 0)
        forks.clear()
        if status:  # beyond its memory, it may also end where nothing could catch that
            late = os.WIFSIGNALED(status) and os.WTERMSIG(status) in OUT_OF_TIME
            verdict = Verdict(exceeded="time" if late else "memory")
            parent.send_bytes(msgspec.msgpack.encode(verdict))


def _set_alarms(computing: float, in_all: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, computing)
    signal.setitimer(signal.ITIMER_REAL, in_all)


def attempt(compiler: GrammarCompiler, constraint: Constraint) -> Verdict:
    """Compile it and compute its first mask; the result is not kept."""
    try:
        make_first_mask(compiler.build(constraint), constraint)
    except MemoryError:
        return Verdict(exceeded="memory")
    except RootlaceError as error:
        return Verdict(error=str(error))
    except RecursionError:
        return Verdict(error=f"{constraint.kind}: nested too deeply")
    return Verdict()


def make_first_mask(grammar: Grammar, constraint: Constraint) -> None:
    """Compute it: that may take longer than all before. Raises InvalidConstraint if it fails."""
    matcher = grammar.matcher()
    matcher.allowed_mask()
    if error := matcher.error():
        raise InvalidConstraint(f"{constraint.kind}: {error}")


def _read_all(
    parent: Connection[Any, Any], messages: queue.SimpleQueue[bytes], forks: list[int]
) -> None:
    """Ends the process, and `forks`, with the parent, and also where a message does not fit into
    memory: nobody would read the next one."""
    status = 1
    try:
        while True:
            messages.put(parent.recv_bytes())
    except (EOFError, OSError):
        status = 0
    finally:
        for fork in forks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(fork, signal.SIGKILL)
        os._exit(status)


def _limit_memory(extra: int) -> None:
    """Bound the address space to what is in use now and `extra` bytes (where the system can)."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = psutil.Process().memory_info().vms + extra
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
