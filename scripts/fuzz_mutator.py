"""Changes of JSON and MessagePack that keep the format, which a fuzzer of bytes seldom makes."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 0.5, -0.0, 1e308),
    *("F32", "BF16", "I4", [1, 2], [0, 64], {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}),
    *("", "a", "\x00", "\ud7ff", "\U0001f600", "*" * 300, "[a-z]{1,99}", "#/$defs/a", "self"),
    *([], {}, [[]], [{}]),
)


def _header(file: bytes) -> Any:
    """Return the header of a file of safetensors."""
    return msgspec.json.decode(file[8 : 8 + int.from_bytes(file[:8], "little")])


def _file(header: Any) -> bytes:
    text = msgspec.json.encode(header)
    return len(text).to_bytes(8, "little") + text + bytes(64)


CODECS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    **dict.fromkeys(("http", "schema", "tag"), (msgspec.json.decode, msgspec.json.encode)),
    "safetensors": (_header, _file),
    "wire": (msgspec.msgpack.decode, msgspec.msgpack.encode),
}
"""Of the readers whose inputs are such."""


class Mutator:
    """Moves values of a corpus to other places. `mutate_bytes` is the fuzzer's own."""

    def __init__(
        self, reader: str, corpus: Iterable[bytes], mutate_bytes: Callable[[bytes, int], bytes]
    ) -> None:
        self._decode, self._encode = CODECS[reader]
        self._mutate_bytes = mutate_bytes
        self._keys: list[str] = []
        self._values: list[Any] = list(LEAVES)
        for data in corpus:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._learn(self._decode(data))

    def __call__(self, data: bytes, max_size: int, seed: int) -> bytes:
        dice = random.Random(seed)
        try:
            whole = self._decode(data)
            for _ in range(dice.choice((1, 1, 2, 4)) if dice.random() < 0.8 else 0):
                whole = self._changed(whole, dice)
            changed = self._encode(whole)
        except (ValueError, UnicodeError, RecursionError, msgspec.MsgspecError):
            changed = data
        if changed == data or len(changed) > max_size:
            return self._mutate_bytes(data, max_size)
        return changed

    def _learn(self, value: Any) -> None:
        self._values.append(value)
        if isinstance(value, dict):
            self._keys += (key for key in value if isinstance(key, str))
        children = value.values() if isinstance(value, dict) else value
        for child in children if isinstance(value, dict | list) else ():
            self._learn(child)

    def _changed(self, value: Any, dice: random.Random) -> Any:
        """Return `value` with one place changed."""
        if not isinstance(value, dict | list) or not value or dice.random() < 0.1:
            return copy.deepcopy(dice.choice(self._values))
        key = dice.choice(list(value) if isinstance(value, dict) else range(len(value)))
        kind = dice.random()
        if kind < 0.5:
            value[key] = self._changed(value[key], dice)
        elif kind < 0.6:
            del value[key]
        elif isinstance(value, list):
            value.insert(key, copy.deepcopy(dice.choice((value[key], dice.choice(self._values)))))
        else:
            name = dice.choice(self._keys) if self._keys else "a"
            value[name] = copy.deepcopy(dice.choice((value[key], dice.choice(self._values))))
        return value
