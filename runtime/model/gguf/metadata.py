"""What a GGUF file says of its model: each key of its architecture is read or refused by name."""

from __future__ import annotations

import struct
from array import array
from typing import Any, NoReturn

from rootlace.runtime.model.families.given import NUMBER, REQUIRED, SIZE, Given, Kind
from rootlace.runtime.model.gguf.file import GgufFile

ONLY: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.shared_kv_layers": 0,
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_used_count": 0,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
    "pooling_type": 0,
    "use_parallel_residual": False,
}
"""Keys of which one value is supported, where an architecture does not read them."""
REMARKS = ("rope.scaling.finetuned", "tensor_data_layout", "vocab_size")
"""Keys that change nothing. How many tokens there are, the embedding says."""


class Metadata:
    """The keys of a file that begin with its architecture's name, without that; what is refused is
    called by its whole name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._prefix = f"{architecture}."
        values = {
            key: value.tolist() if isinstance(value, array) else value
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
        }
        self._given = Given(file.path, values)
        self._asked: set[str] = set()

    def __call__(self, key: str, kind: Kind, default: Any = REQUIRED) -> Any:
        """As of `Given`."""
        self._asked.add(key)
        return self._given(self._prefix + key, kind, default)

    def size(self, key: str, default: Any = REQUIRED) -> int:
        """A positive integer. A list with one number for each layer counts as that number, if it is
        the same for all."""
        same = Kind(
            "a positive integer, the same for all layers",
            lambda v: SIZE.fits(v) or (type(v) is list and len(set(v)) == 1 and SIZE.fits(v[0])),
        )
        found = self(key, same, default)
        return found[0] if isinstance(found, list) else found

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A number, as whoever wrote it will have written it: files have it rounded to float32."""
        return as_written(self(key, NUMBER, default))

    def only(self, key: str, value: object) -> None:
        """Refuse any other value of the key."""
        self._asked.add(key)
        self._given.only(self._prefix + key, value)

    def refuse(self, key: str, why: str) -> NoReturn:
        self._given.refuse(self._prefix + key, why)

    def has_tensor(self, name: str) -> bool:
        return name in self._file.tensors

    def floats(self, name: str) -> list[float] | None:
        """The numbers of a small tensor; None if the file does not have it."""
        tensor = self._file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            self.refuse(name, f"it is a tensor of {tensor.type.name} {list(tensor.shape)}")
        return [as_written(one) for one in struct.unpack(f"<{tensor.shape[0]}f", tensor.data)]

    def finish(self) -> None:
        """Refuse the keys that nobody has read."""
        for key in REMARKS:
            self(key, Kind("anything", lambda value: True), None)
        for key in ONLY.keys() - self._asked:
            self.only(key, ONLY[key])
        self._given.finish()


def as_written(value: Any) -> Any:
    """The shortest decimal number that float32 rounds to `value`, if it is a number of float32."""
    if not isinstance(value, float):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 1e38 and struct.unpack("<f", struct.pack("<f", short))[0] == value:
            return short
    return value
