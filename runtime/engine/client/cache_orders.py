"""The prompts that an engine has pinned, for the next one to pin them again."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from rootlace.runtime.config import EngineConfig
from rootlace.runtime.contracts.messages import EngineOutput, EngineRequest, Flush, ForgetNamespace
from rootlace.wire.errors import RootlaceError
from rootlace.wire.protocol import SamplingParams
from rootlace.wire.sampling import PIN_SECONDS, PRIORITIES, Cache, Handling

# Forget file --------------------------------------------------------------------------------------
#
# What engines are to forget, on the disk beside what they are to forget it from.


class ForgetFile:
    """This process has it alone, and the next server of the same model finds what is in it: a line
    of JSON each, the namespace, or null for a flush."""

    def __init__(self, root: Path, model: str) -> None:
        """In this folder, which is made if need be. Raises OSError."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        for number in itertools.count():  # other servers may have those before
            self._file = os.open(root / f"forget-{digest}-{number}", flags, 0o600)
            try:
                with contextlib.suppress(PermissionError):  # where files cannot be locked
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(self._file)
        self.lines = 0

    def read(self) -> list[Flush | ForgetNamespace]:
        """What the server before was not sure of; a line that cannot be read is a flush."""
        data = os.pread(self._file, os.fstat(self._file).st_size, 0).splitlines()
        self.lines = len(data)
        return [_message(line) for line in data]

    def add(self, message: Flush | ForgetNamespace) -> None:
        """The death of this process does not lose it. Raises OSError."""
        self._write(_line(message), os.fstat(self._file).st_size)
        self.lines += 1

    def replace(self, messages: list[Flush | ForgetNamespace]) -> None:
        """Raises OSError."""
        lines = b"".join(map(_line, messages))
        # Over what is there: a full disk has room for that, and what comes behind it, with a line
        # that is cut, stays until all of this is there.
        self._write(lines, 0)
        os.ftruncate(self._file, len(lines))
        self.lines = len(messages)

    def _write(self, lines: bytes, at: int) -> None:
        while lines:
            count = os.pwrite(self._file, lines, at)
            lines, at = lines[count:], at + count

    def close(self) -> None:
        os.close(self._file)


def _line(message: Flush | ForgetNamespace) -> bytes:
    namespace = message.namespace if isinstance(message, ForgetNamespace) else None
    return msgspec.json.encode(namespace) + b"\n"


def _message(line: bytes) -> Flush | ForgetNamespace:
    try:
        namespace = msgspec.json.decode(line, type=str | None)
    except msgspec.DecodeError:
        namespace = None
    return Flush(0) if namespace is None else ForgetNamespace(namespace)


# Forgets ------------------------------------------------------------------------------------------
#
# What engines were told to forget, for those that may not have heard of it, or not done it yet.


SECONDS = 60.0
"""So long after it was told, what is to be forgotten may still be on an engine's disk: it may be in
a step, or hang, and erases behind what it writes."""
MOST = 65536
"""Of more than that, all is forgotten."""
SPARE_LINES = 64
"""The file may have so many lines, and as many as it needs, that are of no use any more."""


class Forgets:
    """An engine that dies leaves its blocks on a disk, where it, or whichever of its siblings is
    started again first, finds them. So each is told again as it starts what was to be forgotten
    since an engine went down, and shortly before that; with a `file`, the engines of the next
    server are, too. `keep`: all that was ever to be forgotten is told, to engines of machines that
    were away for a while, with disks of their own."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        file: ForgetFile | None = None,
        keep: bool = False,
    ) -> None:
        self._clock = clock
        self._file = file
        self._keep = keep
        self._told: dict[Flush | ForgetNamespace, float] = {}
        """When it was told, the oldest first."""
        self._down = 0
        for message in [] if file is None else file.read():
            self._told[message] = clock()

    @classmethod
    def of(cls, config: EngineConfig) -> Forgets:
        """In a file where the engines of this machine keep blocks on a disk."""
        if not config.cache.disk:
            return cls()
        try:
            root = Path(config.cache.disk).expanduser()
            return cls(file=ForgetFile(root, config.executor.model))
        except OSError as error:
            log.error("what is to be forgotten ends with this process: %s", error)
            return cls()

    def note(self, message: Flush | ForgetNamespace) -> None:
        """All engines are told it now, those that are down in vain."""
        whole = isinstance(message, Flush) or len(self._told) >= MOST
        if whole:
            self._told.clear()
            message = Flush(0)  # nobody waits for the answer
        self._told.pop(message, None)
        self._told[message] = self._clock()
        self._write(None if whole else message)
        self.drop_old()

    def died(self) -> None:
        """An engine is down."""
        self.drop_old()
        self._down += 1

    def to_started(self, returned: bool) -> list[Flush | ForgetNamespace]:
        """An engine is there, one of those that were down if it `returned`: what it is to be told
        before anything else."""
        self._down -= returned
        self._told = dict.fromkeys(self._told, self._clock())
        return list(self._told)

    def drop_old(self) -> None:
        """Let go of what all have done by now."""
        if self._keep:
            return
        oldest, had = self._clock() - SECONDS, len(self._told)
        while not self._down and self._told and self._told[next(iter(self._told))] < oldest:
            del self._told[next(iter(self._told))]
        if had and not self._told:
            self._write(None)

    def close(self) -> None:
        """The next server finds the rest. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, message: Flush | ForgetNamespace | None) -> None:
        """Keep this message, too, or, without one, only what is needed."""
        if self._file is None:
            return
        try:
            if message is None or self._file.lines >= 2 * len(self._told) + SPARE_LINES:
                self._file.replace(list(self._told))
            else:
                self._file.add(message)
        except OSError as error:
            log.error("what is to be forgotten is not on the disk: %s", error)


# Pinned prompts -----------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_COMPUTED = SamplingParams(max_tokens=0, temperature=0.0, seed=0)

MOST_TOKENS = 16 * 2**20
"""Of all prompts that are kept, four bytes each; beyond it, the oldest are not pinned again, but
count as lost if their engine dies."""


@dataclass
class _Pinned:
    request: EngineRequest
    until: float
    tokens: int
    again: int | None = None
    """The id of the request that pins it again."""

    @property
    def kept(self) -> bool:
        """Whether its tokens are still known."""
        return len(self.request.token_ids) == self.tokens


class PinnedPrompts:
    """Pins die with their engine, or with its KV where a step fails: they are computed again,
    behind all other work, and each is pinned for the time that it had left."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pinned: dict[str, _Pinned] = {}
        self._tokens = 0
        self._let_go: set[int] = set()
        """Requests that were to pin again what was let go, until their last update: they may have
        done it before they could be aborted."""
        self.restored = self.lost = 0

    def note(self, pin: str, request: EngineRequest) -> None:
        """The engine has pinned the request's prompt, or has renewed the pin."""
        until = self._clock() + (request.handling.cache.ttl or PIN_SECONDS)
        known = self._pinned.get(pin)
        if request.rid in self._let_go or (known is not None and known.again == request.rid):
            return
        if known is not None:
            known.until = until = max(known.until, until)
            if known.kept or known.again is not None:
                return
            self._drop(pin)
        self._drop_old()
        self._pinned[pin] = _Pinned(request, until, len(request.token_ids))
        self._tokens += len(request.token_ids)
        for oldest in self._pinned.values():
            if self._tokens <= MOST_TOKENS:
                break
            self._tokens -= len(oldest.request.token_ids)
            none = np.empty(0, np.int32)
            oldest.request = msgspec.structs.replace(oldest.request, token_ids=none)

    def let_go(
        self, abort: Callable[[Iterable[int]], None], pin: str, namespace: str | None
    ) -> bool:
        """Whether there was such a pin of this namespace (None: of any). It is not pinned again,
        and a request that is to do that is aborted; an `Unpin` that the engine is sent after this
        finds what the request has done before."""
        self._drop_old()
        known = self._pinned.get(pin)
        if known is None or namespace not in (None, known.request.namespace):
            return False
        self._drop(pin)
        if known.again is not None:
            self._let_go.add(known.again)
            abort([known.again])
        return True

    def pin_again(self, next_rid: Callable[[], int], submit: Callable[..., None]) -> None:
        """Submit what pins again what an engine has lost; what cannot be submitted is lost."""
        for pin, request in self.again(next_rid):
            try:
                submit(request, partial(self.heard, pin), stays=True)
            except RootlaceError as error:
                self.lose(pin, str(error))

    def again(self, next_rid: Callable[[], int]) -> Iterator[tuple[str, EngineRequest]]:
        """What the next engine, or the one that has lost all KV, is to be sent, each with its pin.
        What had still to be pinned again waits for it anyway."""
        self._drop_old()
        for pin, known in list(self._pinned.items()):
            if known.again is not None:
                continue
            if not known.kept:
                self.lose(pin, f"of all prompts, {MOST_TOKENS} tokens are kept for that")
                continue
            known.again = next_rid()
            left = known.until - self._clock()
            yield (
                pin,
                EngineRequest(
                    known.again,
                    known.request.token_ids,
                    _COMPUTED,
                    namespace=known.request.namespace,
                    adapter=known.request.adapter,
                    handling=Handling(-PRIORITIES, cache=Cache(pin="try", ttl=left)),
                    resumed=True,
                    client=known.request.client,
                    max_pins=known.request.max_pins,
                ),
            )

    def heard(self, pin: str, update: EngineOutput) -> None:
        """What the engine tells of a request that pins again."""
        if update.finish is not None:
            self._let_go.discard(update.rid)
        known = self._pinned.get(pin)
        if known is None or known.again != update.rid:
            return
        if update.pin:
            known.again = None
            self.restored += 1
        elif update.finish is not None:
            self.lose(pin, update.error or "there is no room for it")

    def lose(self, pin: str, reason: str) -> None:
        """It cannot be pinned again."""
        tokens = self._drop(pin).tokens
        self.lost += 1
        log.warning("a pinned prompt of %d tokens is not pinned any more: %s", tokens, reason)

    def _drop_old(self) -> None:
        now = self._clock()
        for pin in [pin for pin, known in self._pinned.items() if known.until <= now]:
            self._drop(pin)

    def _drop(self, pin: str) -> _Pinned:
        known = self._pinned.pop(pin)
        self._tokens -= len(known.request.token_ids)
        return known
