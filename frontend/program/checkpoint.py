"""Batches that are kept as they go on: a line of JSON for each row that is done."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from rootlace.language.state import ProgramState, State
from rootlace.wire.errors import InvalidRequest


@dataclass(frozen=True)
class Checkpoint:
    """Where `run_batch(checkpoint=...)` keeps the states of rows that are done. `types` are those
    of variables (`State.from_json`) in rows that are read from there."""

    path: str | Path
    types: Mapping[str, Any] = field(default_factory=dict)


class Journal:
    """The open file of a checkpoint. A row is known by its number, its arguments, the program and
    the model: one that was changed since is run again; one that failed, or cannot be read, too."""

    def __init__(
        self, checkpoint: Checkpoint | str | Path, program: str, model: str, batch: Sequence[Any]
    ) -> None:
        """`program` and `model` are names. Raises InvalidRequest for arguments that JSON cannot
        hold."""
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        self._keys = [_key(program, model, index, row) for index, row in enumerate(batch)]
        self._lock = threading.Lock()
        path = Path(checkpoint.path)
        self.done: dict[int, ProgramState] = {}
        """The rows that need not be run."""
        if path.exists():
            self._read(path, checkpoint.types)
        self._file: IO[bytes] = path.open("ab")
        if self._file.tell() and not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # behind a line that was cut off

    def _read(self, path: Path, types: Mapping[str, Any]) -> None:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    index, key, state = msgspec.json.decode(line, type=_LINE)
                    if 0 <= index < len(self._keys) and self._keys[index] == key:
                        self.done[index] = State.from_json(bytes(state), types)
                except (msgspec.DecodeError, InvalidRequest):
                    continue

    def add(self, index: int, state: ProgramState) -> None:
        """Row `index` is done: write it, from any thread. Raises InvalidRequest for a state that
        JSON cannot hold."""
        if state.error() is not None:
            return
        line = msgspec.json.encode(
            (index, self._keys[index], msgspec.Raw(state.to_json().encode()))
        )
        with self._lock:
            if not self._file.closed:  # else the batch was cancelled
                self._file.write(line + b"\n")
                self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()


_LINE = tuple[int, str, msgspec.Raw]


def _key(program: str, model: str, index: int, arguments: Any) -> str:
    try:
        written = msgspec.json.encode((program, model, arguments), order="sorted")
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"batch[{index}]: a checkpoint needs arguments that JSON can hold: {error}"
        ) from None
    return hashlib.sha256(written).hexdigest()[:32]
