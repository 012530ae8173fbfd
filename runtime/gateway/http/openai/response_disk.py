"""Kept responses in a file of SQLite, so that they outlive the server.

Calls write in a thread, in the order in which they are made; `flush` waits for them.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rootlace.wire.errors import InvalidRequest

log = logging.getLogger(__name__)

VERSION = 1
_SETTINGS = """
pragma journal_mode = wal;
pragma synchronous = normal;
pragma secure_delete = on;
"""
_TABLES = f"""
create table messages (number integer primary key, message blob not null);
create table responses (
    place integer primary key, id text not null, owner text not null, salt text not null,
    response blob not null, messages blob not null
);
create unique index of_owner on responses (owner, id);
pragma user_version = {VERSION};
"""


@dataclass(frozen=True)
class Kept:
    """A response as it was kept, oldest first. Messages have numbers, which conversations share."""

    id: str
    owner: str
    salt: str
    response: Mapping[str, Any]
    numbers: Sequence[int]


class ResponseDisk:
    """The file. Raises InvalidRequest where it cannot be used.

    What cannot be written later, as where the disk is full, is logged once and not kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._file.executescript(_SETTINGS)
            (version,) = self._file.execute("pragma user_version").fetchone()
            if version == 0:
                self._file.executescript(f"begin; {_TABLES} commit;")
            elif version != VERSION:
                raise InvalidRequest(f"{path} has version {version} of the format, not {VERSION}")
        except (sqlite3.Error, OSError) as error:
            raise InvalidRequest(f"{path} cannot keep responses: {error}") from error

    def read(self) -> tuple[dict[int, dict[str, Any]], list[Kept]]:
        """The messages by number, and the responses all of whose messages are there. Raises
        InvalidRequest."""
        columns = "id, owner, salt, response, messages"
        try:
            rows = self._file.execute("select number, message from messages")
            messages = {number: msgspec.json.decode(message) for number, message in rows}
            found = self._file.execute(f"select {columns} from responses order by place")
            kept = [Kept(*row[:3], *map(msgspec.json.decode, row[3:])) for row in found]
        except (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{self._path} cannot be read: {error}") from error
        return messages, [one for one in kept if messages.keys() >= set(one.numbers)]

    def put(self, kept: Kept, new: dict[int, dict[str, Any]]) -> None:
        """Keep a response, and the messages that no other has."""
        row = (kept.id, kept.owner, kept.salt, _json(kept.response), _json(list(kept.numbers)))
        texts = [(number, _json(message)) for number, message in new.items()]

        def write() -> None:
            self._file.executemany("insert into messages values (?, ?)", texts)
            self._file.execute("insert into responses values (null, ?, ?, ?, ?, ?)", row)

        self._submit(write)

    def remove(self, response_id: str, owner: str, unused: Sequence[int]) -> None:
        """Forget a response, and the messages that no other has any more."""

        def write() -> None:
            self._file.execute(
                "delete from responses where owner = ? and id = ?", (owner, response_id)
            )
            self._file.executemany("delete from messages where number = ?", [(n,) for n in unused])

        self._submit(write)

    async def flush(self) -> None:
        """Return when the system has all of it, whatever becomes of this process."""
        await asyncio.wrap_future(self._thread.submit(lambda: None))

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()

    def _submit(self, write: Callable[[], None]) -> None:
        self._thread.submit(self._transaction, write)

    def _transaction(self, write: Callable[[], None]) -> None:
        try:
            self._file.execute("begin")
            write()
            self._file.execute("commit")
            self._failed = False
        except sqlite3.Error as error:
            if self._file.in_transaction:
                self._file.execute("rollback")
            if not self._failed:
                log.error("%s: responses are not kept on disk: %s", self._path, error)
            self._failed = True


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
