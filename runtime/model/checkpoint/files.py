"""The safetensors files of a model folder, single or sharded, and what they must hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rootlace.runtime.model.checkpoint.folder import INDEX, SINGLE
from rootlace.wire.errors import UnsupportedModel

Shape = tuple[int, ...]

_DTYPES = {"F32", "F16", "BF16", "F64"}


class Checkpoint:
    """The safetensors files of a model folder, opened (memory-mapped) while in the `with` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}

    def __enter__(self) -> Checkpoint:
        try:
            for name in self._file_names():
                self._open(name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def expect(self, shapes: dict[str, Shape], ignored: Callable[[str], bool]) -> None:
        """Check names, shapes and types against the architecture's."""
        missing = sorted(shapes.keys() - self._file_of.keys())
        if missing:
            raise UnsupportedModel(f"{self._folder}: weights are missing: {_some(missing)}")
        extra = sorted(name for name in self._file_of.keys() - shapes.keys() if not ignored(name))
        if extra:
            raise UnsupportedModel(
                f"{self._folder}: weights that the architecture does not have: {_some(extra)}"
            )
        for name, shape in shapes.items():
            view = self._files[self._file_of[name]].get_slice(name)
            found = tuple(view.get_shape())
            where = f"{self._folder / self._file_of[name]}: {name}"
            if found != shape:
                raise UnsupportedModel(f"{where} has shape {list(found)}, expected {list(shape)}")
            if view.get_dtype() not in _DTYPES:
                raise UnsupportedModel(f"{where} has type {view.get_dtype()}, not a float type")

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether a folder has weights at all."""
        return (folder / SINGLE).exists() or (folder / INDEX).exists()

    def names(self) -> Collection[str]:
        """Every stored tensor."""
        return self._file_of.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor, backed by the mapped file (valid inside the `with` block)."""
        if name not in self._file_of:
            raise UnsupportedModel(f"{self._folder}: weights are missing: {name}")
        return self._files[self._file_of[name]].get_tensor(name)

    def _file_names(self) -> list[str]:
        if (self._folder / SINGLE).exists():
            return [SINGLE]
        index = self._folder / INDEX
        if not index.exists():
            raise UnsupportedModel(f"{self._folder}: neither {SINGLE} nor {INDEX} is there")
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UnsupportedModel(f"{index}: not a weight index: {error!r}") from error
        for name in names:
            # The index is data: it may not lead out of the folder.
            if not isinstance(name, str) or Path(name).name != name:
                raise UnsupportedModel(f"{index}: weight_map: bad file name {name!r}")
        return sorted(set(names))

    def _open(self, name: str) -> None:
        file = self._folder / name
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
        except FileNotFoundError:
            raise UnsupportedModel(f"{file}: the file is missing") from None
        except (OSError, SafetensorError) as error:
            raise UnsupportedModel(f"{file}: {error}") from error
        self._files[name] = handle
        for weight in handle.keys():  # noqa: SIM118  (a handle is not iterable)
            self._file_of[weight] = name


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
