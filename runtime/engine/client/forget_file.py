"""What engines are to forget, on the disk beside what they are to forget it from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
from pathlib import Path

import msgspec

from rootlace.runtime.contracts.messages import Flush, ForgetNamespace


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
