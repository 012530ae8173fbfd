"""What a key may do, and has done."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar

from rootlace.runtime.gateway.keys.key_file import KeyEntry
from rootlace.runtime.gateway.keys.quota import Quota
from rootlace.wire.errors import InvalidRequest, QuotaExceeded, Unauthorized

_MARK = "@"
_CALLER: ContextVar[Account | None] = ContextVar("caller", default=None)

Count = Callable[[str, str, int], None]
"""Called with a key's name, what was used, and how much."""


class Account:
    """A key of the file: its part of the cache and its quotas.

    `removed`: the file has it no longer. `refresh` reads the file again if it has changed.
    """

    def __init__(
        self,
        entry: KeyEntry,
        count: Count,
        refresh: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = entry.name
        self.removed = False
        self._count = count
        self._refresh = refresh
        self._clock = clock
        self._quotas: dict[str, Quota] = {}
        self.change(entry)

    def change(self, entry: KeyEntry) -> None:
        """The entry is new; a quota that is as before keeps its level."""
        self.entry = entry
        for unit, limit in (
            ("requests", entry.requests_per_minute),
            ("tokens", entry.tokens_per_minute),
        ):
            known = self._quotas.get(unit)
            if limit is None:
                self._quotas.pop(unit, None)
            elif known is None or known.per_minute != limit:
                self._quotas[unit] = Quota(limit, self._clock)

    def admit(self) -> None:
        """Count a request. Raises what `check` raises."""
        self.check()
        if "requests" in self._quotas:
            self._quotas["requests"].take(1)
        self._count(self.name, "requests", 1)

    def check(self) -> None:
        """Raises QuotaExceeded if there is nothing left, Unauthorized if the key was removed."""
        self._refresh()
        if self.removed:
            raise Unauthorized(f"the API key {self.name!r} was removed")
        for unit, quota in self._quotas.items():
            if wait := quota.seconds_to_wait():
                self._count(self.name, "refused", 1)
                error = QuotaExceeded(
                    f"the API key {self.name!r} has used its {quota.per_minute} {unit} per minute; "
                    f"try again in {math.ceil(wait)} s"
                )
                error.retry_after = wait
                raise error

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequest for one that is higher than the key's."""
        most = self.entry.max_priority
        if most is not None and priority > most:
            raise InvalidRequest(
                f"priority: the API key {self.name!r} may ask for {most} at most (max_priority)"
            )

    def used(self, kind: str, tokens: int) -> None:
        """So many tokens of a kind ("prompt" or "completion") were asked for or made."""
        if "tokens" in self._quotas:
            self._quotas["tokens"].take(tokens)
        self._count(self.name, f"{kind}_tokens", tokens)

    def namespace(self, salt: str) -> str:
        """The cache's namespace for the key's `salt`: no other key's, unless both are shared."""
        if self.entry.namespace == "own":
            return f"{_MARK}{self.name}/{salt}"
        # No name is empty, so this is nobody's own.
        return f"{_MARK}/{salt}" if salt.startswith(_MARK) else salt

    def salt(self, namespace: str) -> str:
        """What `namespace` made a namespace of."""
        own = self.entry.namespace == "own"
        return namespace.removeprefix(f"{_MARK}{self.name}/" if own else f"{_MARK}/")


def caller() -> Account | None:
    """Whose HTTP request this is; None where no key of the file was given."""
    return _CALLER.get()


def owner() -> str:
    """The name of that account, "" for none: what belongs to one is not found by others."""
    account = caller()
    return "" if account is None else account.name


def admitted() -> Account | None:
    """The same, when one request more was counted. Raises as `Account.admit` does."""
    account = _CALLER.get()
    if account is not None:
        account.admit()
    return account


def set_caller(account: Account | None) -> None:
    """Whose the request is that the running task answers; other tasks do not see it."""
    _CALLER.set(account)


def client_of(account: Account | None, source: str) -> str:
    """Whose turn it is, and whose share: the key's or, without one, that of the address or session
    `source`. None of these looks like a key's."""
    return source if account is None else f"key {account.name}"


def namespace_of(account: Account | None, salt: str | None) -> str:
    """The cache's namespace for a client's `salt`."""
    return account.namespace(salt or "") if account is not None else salt or ""


def private(namespace: str) -> str:
    """A namespace that nobody else can name, beside this one."""
    return f"{namespace}~{secrets.token_hex(8)}"
