"""Who a key is."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from rootlace.runtime.gateway.keys.account import Account, Count
from rootlace.runtime.gateway.keys.key_file import read_keys, split_key
from rootlace.wire.errors import InvalidRequest, Unauthorized

log = logging.getLogger(__name__)


class Keys:
    """The operator's key, and those of a file, which is read again when it changes.

    Raises InvalidRequest if the file cannot be read. A file that becomes unreadable later leaves
    things as they are.
    """

    def __init__(self, operator: str, path: str, count: Count) -> None:
        self.needed = bool(operator or path)
        self._operator = operator.encode()
        self._path = path
        self._count = count
        self._accounts: dict[str, Account] = {}  # by the id
        self._seen: tuple[int, ...] | None = None
        if path:
            self._seen = self._state()
            self._read()

    def check(self, key: str) -> Account | None:
        """Whose key this is; None for the operator's, or where none is needed.

        Raises Unauthorized.
        """
        if not self.needed:
            return None
        # compare_digest takes as long for a key that is nearly right as for any other.
        given = key.encode("utf-8", "surrogateescape")
        if self._operator and hmac.compare_digest(given, self._operator):
            return None
        self.refresh()
        key_id, secret = split_key(key)
        account = self._accounts.get(key_id)
        if account is None or not account.entry.opens_with(secret):
            raise Unauthorized("the API key is missing or wrong")
        return account

    def named(self, name: str) -> Account:
        """The key of that name. Raises Unauthorized if there is none any more."""
        self.refresh()
        for account in self._accounts.values():
            if account.name == name:
                return account
        raise Unauthorized(f"the API key {name!r} was removed")

    def refresh(self) -> None:
        """Read the file if it is another than the last one that was looked at."""
        state = self._state() if self._path else None
        if state == self._seen:
            return
        self._seen = state
        try:
            self._read()
        except InvalidRequest as error:
            log.warning("the keys stay as they were: %s", error)

    def _read(self) -> None:
        entries = {entry.id: entry for entry in read_keys(self._path)}
        for key_id in self._accounts.keys() - entries.keys():
            self._accounts.pop(key_id).removed = True
        for key_id, entry in entries.items():
            known = self._accounts.get(key_id)
            if known is not None and known.name == entry.name:
                known.change(entry)
                continue
            if known is not None:
                known.removed = True
            self._accounts[key_id] = Account(entry, self._count, self.refresh)

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = Path(self._path).stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
