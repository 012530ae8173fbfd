"""The file of API keys. It holds no key: only what tells whether a key is the right one."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from rootlace.wire.errors import InvalidRequest
from rootlace.wire.handling import Priority

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
