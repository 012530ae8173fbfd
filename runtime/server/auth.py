"""API keys: file of keys, quotas, and the account of each key."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from rootlace.wire.errors import InvalidRequest, QuotaExceeded, Unauthorized
from rootlace.wire.sampling import Priority

# Quota --------------------------------------------------------------------------------------------


class Quota:
    """Token bucket that fills evenly up to `per_minute`; tokens already spent are never refused.

    Tokens are counted only once they are computed. So `take` may exceed the level, and nothing more
    is admitted until the debt is paid.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._then = clock()

    def seconds_to_wait(self) -> float:
        """Return the seconds until the level reaches 1; 0 if the level is 1 or more now."""
        now = self._clock()
        filled = self._level + (now - self._then) * self.per_minute / 60
        self._level, self._then = min(filled, self.per_minute), now
        return max(1 - self._level, 0) * 60 / self.per_minute

    def take(self, amount: int) -> None:
        self._level -= amount


# Key file -----------------------------------------------------------------------------------------
#
# The file holds no key, only digests to check keys with.


_PREFIX = "rl"

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Limit = Annotated[int, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Entry of a key. `digest` is the BLAKE2b of the secret part with `salt`, both in hexadecimal.

    The secret is 256 random bits, so guessing is hopeless and a slow hash would add nothing. `id`
    is the part of the key that finds its entry. The `max_...` fields bound the priority of
    requests, the live pins, and the unfinished batches.
    """

    name: Name
    id: str
    salt: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    namespace: Literal["own", "shared"] = "own"
    max_priority: Priority | None = None
    max_pins: Count | None = None
    max_batches: Count | None = None

    def opens_with(self, secret: str) -> bool:
        """Compare `secret` with this key's in constant time."""
        return hmac.compare_digest(_digest(secret, self.salt), self.digest)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[KeyEntry, ...]


def new_key(name: str, **stated: int | str | None) -> tuple[str, KeyEntry]:
    """Make a key and its entry, with the `stated` limits, namespace and bounds. Raises
    InvalidRequest for a name or limit that is not allowed."""
    key_id, secret, salt = secrets.token_hex(6), secrets.token_hex(32), secrets.token_hex(16)
    fields = {"name": name, "id": key_id, "salt": salt, "digest": _digest(secret, salt), **stated}
    try:
        entry = msgspec.convert(fields, KeyEntry)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"there can be no such key: {error}") from None
    return f"{_PREFIX}-{key_id}-{secret}", entry


def split_key(key: str) -> tuple[str, str]:
    """Split a key into id and secret; both are empty for a key of another form."""
    prefix, _, rest = key.partition("-")
    key_id, _, secret = rest.partition("-")
    return (key_id, secret) if prefix == _PREFIX else ("", "")


def read_keys(path: str) -> tuple[KeyEntry, ...]:
    """Read the key file. Raises InvalidRequest if it is unreadable or two keys share a name."""
    try:
        keys = msgspec.json.decode(Path(path).read_bytes(), type=_File).keys
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the file of API keys cannot be read: {path}: {error}") from None
    names = [entry.name for entry in keys]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"{path} has two keys named {name!r}")
    return keys


def write_keys(path: str, keys: Iterable[KeyEntry]) -> None:
    """Replace the file atomically, with mode 0600: no reader ever sees half of the file."""
    text = msgspec.json.format(msgspec.json.encode(_File(tuple(keys))), indent=1)
    target = Path(path)
    number, name = tempfile.mkstemp(prefix=target.name, dir=target.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text + b"\n")
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _digest(secret: str, salt: str) -> str:
    data = secret.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=32, salt=bytes.fromhex(salt)).hexdigest()


# Account ------------------------------------------------------------------------------------------


_MARK = "@"

CountTokens = Callable[[str, str, int], None]
"""Callback for usage: the key's name, the kind of usage, and the amount."""


class Account:
    """Account of an API key: its part of the cache and its quotas.

    `removed`: the file has the key no longer. `refresh` reads the file again if it has changed.
    """

    def __init__(
        self,
        entry: KeyEntry,
        count: CountTokens,
        refresh: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = entry.name
        self.removed = False
        self._count = count
        self._refresh = refresh
        self._clock = clock
        self._quotas: dict[str, Quota] = {}
        self.counted: Counter[str] = Counter()
        """Requests, tokens and refusals of the key since this server first read the key."""
        self.change(entry)

    def change(self, entry: KeyEntry) -> None:
        """Take a new entry; a quota with the same limit keeps its level."""
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
        """Check as `check` does, and count a request. Raises as `check` does."""
        self.check()
        if "requests" in self._quotas:
            self._quotas["requests"].take(1)
        self._note("requests", 1)

    def check(self) -> None:
        """Raise QuotaExceeded if a quota is used up, Unauthorized if the key was removed."""
        self._refresh()
        if self.removed:
            raise Unauthorized(f"the API key {self.name!r} was removed")
        for unit, quota in self._quotas.items():
            if wait := quota.seconds_to_wait():
                self._note("refused", 1)
                error = QuotaExceeded(
                    f"the API key {self.name!r} has used its {quota.per_minute} {unit} per minute; "
                    f"try again in {math.ceil(wait)} s"
                )
                error.retry_after = wait
                raise error

    def check_priority(self, priority: int) -> None:
        """Raise InvalidRequest for a priority above the key's `max_priority`."""
        limit = self.entry.max_priority
        if limit is not None and priority > limit:
            raise InvalidRequest(
                f"priority: the API key {self.name!r} may ask for {limit} at most (max_priority)",
                "priority",
            )

    def used(self, kind: str, tokens: int) -> None:
        """Count and charge `tokens` of a kind: "prompt" or "completion"."""
        if "tokens" in self._quotas:
            self._quotas["tokens"].take(tokens)
        self._note(f"{kind}_tokens", tokens)

    def _note(self, what: str, count: int) -> None:
        self.counted[what] += count
        self._count(self.name, what, count)

    def namespace(self, salt: str) -> str:
        """Return the tree's namespace for a client's `salt`; only "shared" keys share one."""
        if self.entry.namespace == "own":
            return f"{_MARK}{self.name}/{salt}"
        # No key has an empty name, so no key owns this namespace.
        return f"{_MARK}/{salt}" if salt.startswith(_MARK) else salt

    def salt(self, namespace: str) -> str:
        """Return the `salt` that `namespace` was called with."""
        own = self.entry.namespace == "own"
        return namespace.removeprefix(f"{_MARK}{self.name}/" if own else f"{_MARK}/")


class Asker(NamedTuple):
    """Caller of a request: its account (None without a key of the file), and its turns.

    `source` is an address or a session, then `#` and a connection. `client` takes turns and shares:
    the key or, without a key, the address. No address looks like a key's `client`. `origin` tells
    requests of one `client` apart: address and connection of a key's, else the connection.
    """

    account: Account | None
    source: str
    client: str
    origin: tuple[str, ...]

    @classmethod
    def of(cls, account: Account | None, source: str) -> Asker:
        """Make the caller from its account or, without one, its source."""
        address, _, connection = source.partition("#")
        if account is None:
            return cls(None, source, address, (connection,) if connection else ())
        origin = (*filter(None, (address, connection)),)
        return cls(account, source, f"key {account.name}", origin)


_NOBODY = Asker.of(None, "batches")
ASKER: ContextVar[Asker] = ContextVar("asker", default=_NOBODY)
"""Caller of the HTTP request that the running task answers; other tasks have their own value."""


def caller() -> Account | None:
    """Return the account of the current HTTP request; None without a key of the file."""
    return ASKER.get().account


def owner() -> str:
    """Return the name of the caller's account, "" for none; stored objects are found by it."""
    account = caller()
    return "" if account is None else account.name


def namespace_of(account: Account | None, salt: str | None) -> str:
    """Return the tree's namespace for a client's `salt`."""
    return account.namespace(salt or "") if account is not None else salt or ""


def private(namespace: str) -> str:
    """Return a random namespace below `namespace`, which no client can name."""
    return f"{namespace}~{secrets.token_hex(8)}"


# Keys ---------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class Keys:
    """API keys: the operator's, and those of a file, which is read again when it changes.

    Raises InvalidRequest if the file cannot be read at first. If the file becomes unreadable later,
    the accounts stay as they were.
    """

    def __init__(self, operator: str, path: str, count: CountTokens) -> None:
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
        """Return the account of a key; None for the operator's key, or where no key is needed.

        Raises Unauthorized if the key is missing or wrong.
        """
        if not self.needed:
            return None
        # compare_digest takes as long for a key that is nearly right as for any other.
        sent = key.encode("utf-8", "surrogateescape")
        if self._operator and hmac.compare_digest(sent, self._operator):
            return None
        self.refresh()
        key_id, secret = split_key(key)
        account = self._accounts.get(key_id)
        if account is None or not account.entry.opens_with(secret):
            raise Unauthorized("the API key is missing or wrong")
        return account

    def named(self, name: str) -> Account:
        """Return the account named `name`. Raises Unauthorized if the key was removed."""
        self.refresh()
        for account in self._accounts.values():
            if account.name == name:
                return account
        raise Unauthorized(f"the API key {name!r} was removed")

    def refresh(self) -> None:
        """Read the file again if its inode, size or modification time changed."""
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
            status = Path(self._path).stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


# Program key --------------------------------------------------------------------------------------
#
# The key pair that encrypts programs' connections: ZeroMQ's CURVE, https://rfc.zeromq.org/spec/26.


def read_program_key(path: str) -> bytes:
    """Read the secret key (Z85, 40 characters) at `path`; make the file where there is none.

    Raises InvalidRequest if the file cannot be read or made, lets others read it, or holds no key.
    """
    try:
        _make(path)
        mode = Path(path).stat().st_mode
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise InvalidRequest(f"the key of programs at {path}: {error.strerror}") from error
    if mode & 0o077:
        raise InvalidRequest(f"others may read {path}, a secret key: chmod 600 {path}")
    try:
        zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError):
        raise InvalidRequest(f"{path} holds no secret key of CURVE") from None
    return secret


def public_part(secret: bytes) -> str:
    """Return the public key of a secret key in hexadecimal; in addresses it stands behind `#`."""
    return z85.decode(zmq.curve_public(secret)).hex()


def _make(path: str) -> None:
    """Write a new key file atomically, never readable to others."""
    file = Path(path)
    if file.exists():
        return
    handle, name = tempfile.mkstemp(dir=file.parent)  # of mode 0600
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(zmq.curve_keypair()[1] + b"\n")
        with suppress(FileExistsError):  # another process was faster
            file.hardlink_to(new)
    finally:
        new.unlink()
