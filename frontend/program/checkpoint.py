"""Batches that are kept as they go on: a line of JSON for each row that is done."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from rootlace.language import sampling
from rootlace.language.definition import Definition
from rootlace.language.failures import warn
from rootlace.language.saved import Saved
from rootlace.language.state import ProgramState, State, restored
from rootlace.language.tools import Tools
from rootlace.wire.errors import InvalidRequest, RootlaceError


@dataclass(frozen=True)
class Checkpoint:
    """Where `run_batch(checkpoint=...)` keeps the rows that are done. `types` are those of
    variables (`State.from_json`) in rows that are read from there.

    `keep="value"` writes what the program returned and nothing else: a file that other tools read
    with ease. A row that is read from it has `ret_value`, and neither text nor variables.
    """

    path: str | Path
    types: Mapping[str, Any] = field(default_factory=dict)
    keep: Literal["state", "value"] = "state"

    def __post_init__(self) -> None:
        if self.keep not in ("state", "value"):
            raise InvalidRequest(f"Checkpoint(keep=...) is 'state' or 'value', not {self.keep!r}")


class _Line(msgspec.Struct):
    """A row that is done: its number, its key, and what was kept of it."""

    row: int
    key: str
    state: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Journal:
    """The open file of a checkpoint. A row is known by its number, its arguments and those that the
    program is bound to, the program, the model and the options of the batch: if any of these has
    changed, or if the row failed or cannot be read, it is run again."""

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        program: Definition,
        model: str,
        options: Mapping[str, Any],
        batch: Sequence[Any],
    ) -> None:
        """`model` is a name; `options` are those of `run_batch`, under canonical names. Raises
        InvalidRequest for arguments that JSON cannot hold."""
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        about = (program.name, model, _what_matters(options))
        bound = (program.bind_arguments,) if program.bind_arguments else ()
        self._keys = [_key((*about, *bound, row), index) for index, row in enumerate(batch)]
        self._lock = threading.Lock()
        self._model = model
        self._keep = checkpoint.keep
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
            for text in lines:
                try:
                    line = msgspec.json.decode(text, type=_Line)
                    if 0 <= line.row < len(self._keys) and self._keys[line.row] == line.key:
                        self._take(line, types)
                except (msgspec.DecodeError, InvalidRequest):
                    continue

    def _take(self, line: _Line, types: Mapping[str, Any]) -> None:
        if self._keep == "state" and line.state is not msgspec.UNSET:
            self.done[line.row] = State.from_json(bytes(line.state), types)
        elif self._keep == "value" and line.value is not msgspec.UNSET:
            value = msgspec.json.decode(line.value)
            self.done[line.row] = restored(Saved(self._model, (), {}, value))

    def add(self, index: int, state: ProgramState) -> None:
        """Row `index` is done: write it, from any thread. One that failed is not written, nor one
        that JSON cannot hold, of which there is a warning: both are run again the next time."""
        if state.error() is not None:
            return
        try:
            line = msgspec.json.encode(self._line(index, state))
        except (RootlaceError, msgspec.MsgspecError, TypeError, ValueError, RecursionError) as odd:
            warn(f"batch[{index}] is done, but the checkpoint cannot keep it: {odd}")
            return
        with self._lock:
            if not self._file.closed:  # else the batch was cancelled
                self._file.write(line + b"\n")
                self._file.flush()

    def _line(self, index: int, state: ProgramState) -> _Line:
        line = _Line(index, self._keys[index])
        if self._keep == "value":
            line.value = msgspec.Raw(msgspec.json.encode(state.ret_value))
        else:
            line.state = msgspec.Raw(state.to_json().encode())
        return line

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _what_matters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that what is generated depends on, as JSON can hold them."""
    found = {
        name: value
        for name, value in options.items()
        if name in sampling.PARAMS or name in ("adapter", "token_budget", sampling.TOOL_CHOICE)
    }
    if "logit_bias" in found:  # JSON sorts no keys that are numbers
        found["logit_bias"] = sorted(found["logit_bias"].items())
    tools = options.get("tools")
    if isinstance(tools, Tools):  # the backend says how its model is told of them
        found["tools"] = [tool.definition() for tool in tools]
    else:
        found["constraint"] = sampling.constraint(options)
    return {name: value for name, value in found.items() if value is not None}


def _key(about: tuple[Any, ...], index: int) -> str:
    try:
        written = msgspec.json.encode(about, order="sorted")
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"batch[{index}]: a checkpoint needs arguments that JSON can hold: {error}"
        ) from None
    return hashlib.sha256(written).hexdigest()[:32]
