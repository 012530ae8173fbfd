"""What a key may do, and has done."""

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
    """Fills evenly up to `per_minute`, and is never refused what it has spent already.

    Tokens are known only once they are computed: what is taken may exceed what is there, and
    nothing more is admitted until the debt is paid.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._then = clock()

    def seconds_to_wait(self) -> float:
        """Until there is at least one; 0 if there is one now."""
        now = self._clock()
        filled = self._level + (now - self._then) * self.per_minute / 60
        self._level, self._then = min(filled, self.per_minute), now
        return max(1 - self._level, 0) * 60 / self.per_minute

    def take(self, amount: int) -> None:
        self._level -= amount


# Key file -----------------------------------------------------------------------------------------
#
# The file of API keys. It holds no key: only what tells whether a key is the right one.


_PREFIX = "rl"

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Limit = Annotated[int, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key. `digest` is the BLAKE2b of its secret part with `salt`, both in hexadecimal.

    The secret is 256 random bits, so guessing is hopeless and a slow hash would add nothing. `id`
    is the part of the key by which its entry is found. What is bounded by `max_...`: the priority
    that requests may ask for, the pins that live, and the batches that are unfinished.
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
        """Whether `secret` is this key's; takes as long for one that is nearly right."""
        return hmac.compare_digest(_digest(secret, self.salt), self.digest)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[KeyEntry, ...]


def new_key(
    name: str,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    namespace: str = "own",
    **bounds: int | None,
) -> tuple[str, KeyEntry]:
    """A key and its entry; `bounds` are its fields `max_...`. Raises InvalidRequest for a name or
    limit that may not be."""
    key_id, secret, salt = secrets.token_hex(6), secrets.token_hex(32), secrets.token_hex(16)
    given = {
        "name": name,
        "id": key_id,
        "salt": salt,
        "digest": _digest(secret, salt),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "namespace": namespace,
        **bounds,
    }
    try:
        entry = msgspec.convert(given, KeyEntry)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"there can be no such key: {error}") from None
    return f"{_PREFIX}-{key_id}-{secret}", entry


def split_key(key: str) -> tuple[str, str]:
    """Id and secret of a key; both empty where it is none of ours."""
    prefix, _, rest = key.partition("-")
    key_id, _, secret = rest.partition("-")
    return (key_id, secret) if prefix == _PREFIX else ("", "")


def read_keys(path: str) -> tuple[KeyEntry, ...]:
    """Raises InvalidRequest where the file cannot be read or two keys have one name."""
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
    """Replace the file at once, so that nobody reads half of it; only its owner may read it."""
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
"""Called with a key's name, what was used, and how much."""


class Account:
    """A key of the file: its part of the cache and its quotas.

    `removed`: the file has it no longer. `refresh` reads the file again if it has changed.
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
        """Requests, tokens and refusals since the server knows the key."""
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
        self._note("requests", 1)

    def check(self) -> None:
        """Raises QuotaExceeded if there is nothing left, Unauthorized if the key was removed."""
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
        """Raises InvalidRequest for one that is higher than the key's."""
        most = self.entry.max_priority
        if most is not None and priority > most:
            raise InvalidRequest(
                f"priority: the API key {self.name!r} may ask for {most} at most (max_priority)",
                "priority",
            )

    def used(self, kind: str, tokens: int) -> None:
        """So many tokens of a kind ("prompt" or "completion") were asked for or made."""
        if "tokens" in self._quotas:
            self._quotas["tokens"].take(tokens)
        self._note(f"{kind}_tokens", tokens)

    def _note(self, what: str, count: int) -> None:
        self.counted[what] += count
        self._count(self.name, what, count)

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


class Asker(NamedTuple):
    """Who asks: the account, where a key of the file was given, and who takes turns with others.

    `source` is an address or a session, and a connection behind `#`. `client` is whose turn it is,
    and whose share: the key's or, without one, that of the address. None of these looks like a
    key's. `origin` is who within `client` asks: of a key the address and the connection, else the
    latter.
    """

    account: Account | None
    source: str
    client: str
    origin: tuple[str, ...]

    @classmethod
    def of(cls, account: Account | None, source: str) -> Asker:
        """Of a key or a source."""
        address, _, connection = source.partition("#")
        if account is None:
            return cls(None, source, address, (connection,) if connection else ())
        origin = (*filter(None, (address, connection)),)
        return cls(account, source, f"key {account.name}", origin)


_NOBODY = Asker.of(None, "batches")
ASKER: ContextVar[Asker] = ContextVar("asker", default=_NOBODY)
"""Who asks what the running task answers over HTTP; other tasks do not see it."""


def caller() -> Account | None:
    """Whose HTTP request this is; None where no key of the file was given."""
    return ASKER.get().account


def owner() -> str:
    """The name of that account, "" for none: what belongs to one is not found by others."""
    account = caller()
    return "" if account is None else account.name


def namespace_of(account: Account | None, salt: str | None) -> str:
    """The cache's namespace for a client's `salt`."""
    return account.namespace(salt or "") if account is not None else salt or ""


def private(namespace: str) -> str:
    """A namespace that nobody else can name, beside this one."""
    return f"{namespace}~{secrets.token_hex(8)}"


# Keys ---------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)


class Keys:
    """The operator's key, and those of a file, which is read again when it changes.

    Raises InvalidRequest if the file cannot be read. A file that becomes unreadable later leaves
    things as they are.
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


# Program key --------------------------------------------------------------------------------------
#
# The key pair that encrypts programs' connections: ZeroMQ's CURVE, https://rfc.zeromq.org/spec/26.


def read_program_key(path: str) -> bytes:
    """The secret key (Z85, 40 characters) in the file at `path`, which is made where there is none.

    Raises InvalidRequest for a file that cannot be read or made, that others may read, or that
    holds something else.
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
    """The public key of a secret one, in hexadecimal: clients find it behind `#` in the address."""
    return z85.decode(zmq.curve_public(secret)).hex()


def _make(path: str) -> None:
    """Write a new key, whole, which nobody else can read for a moment either."""
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
