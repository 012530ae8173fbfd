"""The child process in which suspicious constraints are compiled first; `trial_process` starts it.

It gets the vocabulary once, then constraints one at a time, and says of each whether it compiles.
Its address space is bounded; time is for the parent to bound, which kills it.

Frames on its standard input and output are MessagePack behind four bytes of length (big-endian).
When the input ends, the parent has, and the child exits; should it be inside a call then that does
not let go of the interpreter, an alarm of the operating system ends it some time after the bound.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from typing import IO

import msgspec
import psutil
from llguidance import LLTokenizer, TokenizerWrapper

from rootlace.errors import RootlaceError
from rootlace.protocol import Constraint
from rootlace.runtime.config import ConstraintConfig
from rootlace.runtime.constrained.compiler import GrammarCompiler
from rootlace.runtime.constrained.vocabulary import Vocabulary

_LENGTH = struct.Struct(">I")


class Setup(msgspec.Struct, frozen=True):
    """The first frame to the child."""

    config: ConstraintConfig
    size: int
    eos_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    token_bytes: list[bytes]
    documents: dict[str, object]


class Verdict(msgspec.Struct, frozen=True):
    """The child's answer: `error` is why the constraint does not compile, empty if it does."""

    error: str = ""
    out_of_memory: bool = False


class TokenVocabulary(Vocabulary):
    """A vocabulary without its tokenizer: it knows the tokens, not how text is split into them."""

    def __init__(self, setup: Setup) -> None:
        self.size = setup.size
        self.eos_token_ids = setup.eos_token_ids
        self.special_token_ids = frozenset(setup.special_token_ids)
        self.token_bytes = setup.token_bytes

    def encode(self, text: bytes) -> list[int]:
        """Some tokens of the text: what they are makes no difference to the cost of compiling."""
        return [token for byte in text for token in self._byte_tokens.get(byte, ())]

    @cached_property
    def _byte_tokens(self) -> dict[int, tuple[int]]:
        return {data[0]: (i,) for i, data in enumerate(self.token_bytes) if len(data) == 1}

    @cached_property
    def llguidance(self) -> LLTokenizer:
        return LLTokenizer(
            TokenizerWrapper(_WithoutText(self)),
            n_vocab=self.size,
            eos_token=list(self.eos_token_ids),
        )


class _WithoutText:
    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = vocabulary.token_bytes
        self.special_token_ids = sorted(vocabulary.special_token_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def setup_of(
    vocabulary: Vocabulary, config: ConstraintConfig, documents: dict[str, object]
) -> Setup:
    """What the child needs to compile as its parent would."""
    return Setup(
        config,
        vocabulary.size,
        tuple(vocabulary.eos_token_ids),
        tuple(sorted(vocabulary.special_token_ids)),
        vocabulary.token_bytes,
        documents,
    )


def write_frame(stream: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(read: Callable[[int], bytes]) -> bytes:
    """The next frame, by `read(n)`, which gives at most n bytes. Raises EOFError at the end."""
    (length,) = _LENGTH.unpack(_exactly(read, _LENGTH.size))
    return _exactly(read, length)


def _exactly(read: Callable[[int], bytes], count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = read(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# ---------------------------------------------------------------- the child


def main() -> int:
    """Exit status 0 when the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
    # Answers have the output for themselves, whatever a library may print.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # Reads the file descriptor itself; see `processes.call_when_parent_ends`.
        threading.Thread(target=_read_all, args=(frames,), daemon=True).start()
        setup = msgspec.msgpack.decode(frames.get(), type=Setup)
        compiler = GrammarCompiler(
            TokenVocabulary(setup), config=setup.config, documents=setup.documents
        )
        _ = compiler.compile(Constraint("regex", "a"))  # what is built once is built now
        _limit_memory(setup.config.compile_memory_bytes)
        write_frame(answers, Verdict())
        while True:
            constraint = msgspec.msgpack.decode(frames.get(), type=Constraint)
            signal.setitimer(signal.ITIMER_REAL, 2 * setup.config.compile_seconds + 1)
            verdict = attempt(compiler, constraint)
            signal.setitimer(signal.ITIMER_REAL, 0)
            write_frame(answers, verdict)


def attempt(compiler: GrammarCompiler, constraint: Constraint) -> Verdict:
    """Compile it and compute its first mask; the result is not kept."""
    try:
        compiler.build(constraint).matcher().allowed_mask()
    except MemoryError:
        return Verdict(out_of_memory=True)
    except RootlaceError as error:
        return Verdict(error=str(error))
    except RecursionError:
        return Verdict(error=f"{constraint.kind}: nested too deeply")
    return Verdict()


def _read_all(frames: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            frames.put(read_frame(lambda count: os.read(0, count)))
    except (EOFError, OSError):
        os._exit(0)


def _limit_memory(extra: int) -> None:
    """Bound the address space to what is in use now and `extra` bytes (where the system can)."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = psutil.Process().memory_info().vms + extra
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
