"""Orders to the cache that outlive an engine: prefixes to forget, and prompts to pin again.

Sections: forget file, forgets, pinned prompts.
"""

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


class ForgetFile:
    """File of forgets on disk, beside the blocks to forget; each line is a message in JSON. This
    process alone uses the file, and the next server of the same model reads it."""

    def __init__(self, root: Path, model: str) -> None:
        """Open the file in folder `root`, created if missing. Raises OSError."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.blake2b(model.encode(), digest_size=8).hexdigest()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        for number in itertools.count():  # other servers may use the names before
            self._file = os.open(root / f"forget-{digest}-{number}", flags, 0o600)
            try:
                with contextlib.suppress(PermissionError):  # where files cannot be locked
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(self._file)
        self.lines = 0

    def read(self) -> list[Flush | ForgetNamespace]:
        """Return forgets that the server before may not have completed; an unreadable line is a
        flush."""
        data = os.pread(self._file, os.fstat(self._file).st_size, 0).splitlines()
        self.lines = len(data)
        return [_message(line) for line in data]

    def add(self, message: Flush | ForgetNamespace) -> None:
        """Append a forget, which then survives the death of this process. Raises OSError."""
        self._write(_line(message), os.fstat(self._file).st_size)
        self.lines += 1

    def replace(self, messages: list[Flush | ForgetNamespace]) -> None:
        """Replace the content. Raises OSError."""
        lines = b"".join(map(_line, messages))
        # Written over the old content: a full disk has room for that. Later lines, one of them
        # perhaps cut, stay until the write is complete.
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
    return msgspec.json.encode(message) + b"\n"


def _message(line: bytes) -> Flush | ForgetNamespace:
    try:
        return msgspec.json.decode(line, type=Flush | ForgetNamespace)
    except msgspec.DecodeError:
        return Flush(0)


# Forgets ------------------------------------------------------------------------------------------


FORGET_SECONDS = 60.0
"""Seconds after which every engine has completed a forget. Until then an engine may be in a step,
or hang. An engine erases its disk only after its writes."""
MAX_FORGETS = 65536
"""Most forgets remembered; beyond that number everything is forgotten."""
SPARE_LINES = 64
"""Most useless lines in the file, beside an equal number of needed lines."""


class Forgets:
    """Forgets to repeat to engines that start.

    A dead engine leaves blocks on disk, for itself or for the sibling that starts first. So each
    engine gets at its start all forgets since shortly before an engine died. With a `file` the
    engines of the next server get the forgets, too. `keep`: repeat all forgets ever, to engines of
    machines that were away for a while, with disks of their own.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        file: ForgetFile | None = None,
        keep: bool = False,
    ) -> None:
        self._clock = clock
        self._file = file
        self._keep = keep
        self._sent: dict[Flush | ForgetNamespace, float] = {}
        """Map from forget to the time when it was sent, the oldest first."""
        self._down = 0
        for message in [] if file is None else file.read():
            self._sent[message] = clock()

    @classmethod
    def of(cls, config: EngineConfig) -> Forgets:
        """Return the forgets of a configuration, in a file if this machine's engines save blocks on
        disk."""
        if not config.cache.disk:
            return cls()
        try:
            root = Path(config.cache.disk).expanduser()
            return cls(file=ForgetFile(root, config.executor.model))
        except OSError as error:
            log.error("what is to be forgotten ends with this process: %s", error)
            return cls()

    def note(self, message: Flush | ForgetNamespace) -> None:
        """Note a forget that is being sent to all running engines."""
        whole = isinstance(message, Flush) or len(self._sent) >= MAX_FORGETS
        if whole:
            self._sent.clear()
            message = Flush(0)  # no caller waits for the answer
        self._sent.pop(message, None)
        self._sent[message] = self._clock()
        self._write(None if whole else message)
        self.drop_old()

    def died(self) -> None:
        """Note that an engine died."""
        self.drop_old()
        self._down += 1

    def to_started(self, returned: bool) -> list[Flush | ForgetNamespace]:
        """Return forgets to send first to a started engine; `returned`: it was down before."""
        self._down -= returned
        self._sent = dict.fromkeys(self._sent, self._clock())
        return list(self._sent)

    def drop_old(self) -> None:
        """Drop forgets that all engines have completed by now."""
        if self._keep:
            return
        oldest, had = self._clock() - FORGET_SECONDS, len(self._sent)
        while not self._down and self._sent and self._sent[next(iter(self._sent))] < oldest:
            del self._sent[next(iter(self._sent))]
        if had and not self._sent:
            self._write(None)

    def close(self) -> None:
        """Leave the remaining forgets to the next server. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, message: Flush | ForgetNamespace | None) -> None:
        """Append `message` to the file or, without a message, rewrite the needed lines."""
        if self._file is None:
            return
        try:
            if message is None or self._file.lines >= 2 * len(self._sent) + SPARE_LINES:
                self._file.replace(list(self._sent))
            else:
                self._file.add(message)
        except OSError as error:
            log.error("what is to be forgotten is not on the disk: %s", error)


# Pinned prompts -----------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_COMPUTED = SamplingParams(max_tokens=0, temperature=0.0, seed=0)

MAX_PINNED_TOKENS = 16 * 2**20
"""Tokens of remembered prompts, four bytes each. Beyond this bound the oldest prompts are not
pinned again. Their pins are lost if their engine dies."""


@dataclass
class _Pinned:
    request: EngineRequest
    until: float
    tokens: int
    again: int | None = None
    """Id of the request that pins the prompt again."""

    @property
    def remembered(self) -> bool:
        """Return whether the tokens are still remembered."""
        return len(self.request.token_ids) == self.tokens


class PinnedPrompts:
    """Pins to restore after an engine died, or lost its KV in a failed step. The prompts are
    computed again behind all other work, and pinned for each pin's remaining time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pinned: dict[str, _Pinned] = {}
        self._tokens = 0
        self._released: set[int] = set()
        """Requests for released pins, until their last update: a request may pin before its abort.
        """
        self.restored = self.lost = 0

    def note(self, pin: str, request: EngineRequest) -> None:
        """Note that the engine has pinned the request's prompt, or renewed the pin."""
        until = self._clock() + (request.handling.cache.ttl or PIN_SECONDS)
        known = self._pinned.get(pin)
        if request.rid in self._released or (known is not None and known.again == request.rid):
            return
        if known is not None:
            known.until = until = max(known.until, until)
            if known.remembered or known.again is not None:
                return
            self._drop(pin)
        self._drop_old()
        self._pinned[pin] = _Pinned(request, until, len(request.token_ids))
        self._tokens += len(request.token_ids)
        for oldest in self._pinned.values():
            if self._tokens <= MAX_PINNED_TOKENS:
                break
            self._tokens -= len(oldest.request.token_ids)
            none = np.empty(0, np.int32)
            oldest.request = msgspec.structs.replace(oldest.request, token_ids=none)

    def release(
        self, abort: Callable[[Iterable[int]], None], pin: str, namespace: str | None
    ) -> bool:
        """Drop a pin of this namespace (None: any), not to be restored; return whether it existed.

        A request that would restore the pin is aborted. If the request has already pinned, the
        `Unpin` sent to the engine afterwards releases that pin.
        """
        self._drop_old()
        known = self._pinned.get(pin)
        if known is None or namespace not in (None, known.request.namespace):
            return False
        self._drop(pin)
        if known.again is not None:
            self._released.add(known.again)
            abort([known.again])
        return True

    def pin_again(self, next_rid: Callable[[], int], submit: Callable[..., None]) -> None:
        """Submit requests that restore lost pins; a pin whose request is refused is lost."""
        for pin, request in self.again(next_rid):
            try:
                submit(request, partial(self.handle, pin), stays=True)
            except RootlaceError as error:
                self.lose(pin, str(error))

    def again(self, next_rid: Callable[[], int]) -> Iterator[tuple[str, EngineRequest]]:
        """Yield requests that restore pins at the next engine, or after a loss of KV, each with its
        pin. Requests that are already waiting to restore a pin are not repeated."""
        self._drop_old()
        for pin, known in list(self._pinned.items()):
            if known.again is not None:
                continue
            if not known.remembered:
                self.lose(pin, f"of all prompts, {MAX_PINNED_TOKENS} tokens are kept for that")
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

    def handle(self, pin: str, update: EngineOutput) -> None:
        """Take in an update of a request that restores a pin."""
        if update.finish is not None:
            self._released.discard(update.rid)
        known = self._pinned.get(pin)
        if known is None or known.again != update.rid:
            return
        if update.facts is not None and update.facts.pin:
            known.again = None
            self.restored += 1
        elif update.finish is not None:
            self.lose(pin, update.error or "there is no room for it")

    def lose(self, pin: str, reason: str) -> None:
        """Give up a pin that cannot be restored."""
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
