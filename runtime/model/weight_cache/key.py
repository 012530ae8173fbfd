"""What packed weights depend on."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import rootlace.kernels
import rootlace.runtime.model
from rootlace.runtime.model.checkpoint.config import ModelConfig

SAMPLE = 4096
SAMPLES = 64
"""So many places of a file are looked at, of `SAMPLE` bytes each, and its first `BEGINNING`, which
has the names and shapes of tensors."""
BEGINNING = 1 << 20


def cache_key(
    config: ModelConfig,
    files: Iterable[Path],
    library: ctypes.CDLL | None,
    dtype: torch.dtype,
    *asked: str,
) -> str:
    """A digest of everything that the bytes of packed weights follow from: the configuration; of
    each of the weights' `files` its name, size, times of change, beginning and samples; the native
    library and its instruction set, if it is used; this package's code that reads, rounds and
    packs, and the version of torch that it does so with; `dtype` and the options that were `asked`
    for. Raises OSError for a file that cannot be read.

    The times are those of the bytes, which programs can set, and of the file (`st_ctime`), which
    they cannot: weights that are changed in place have another key. So have weights that are only
    copied, or given other rights.
    """
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(data).to_bytes(8, "little") + data)

    add(json.dumps(config.source.config(), sort_keys=True), dtype, *asked, torch.__version__)
    if library is not None:
        add(library.rl_instructions(), Path(library._name).read_bytes())
    for package in (rootlace.kernels, rootlace.runtime.model):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            add(source.name, source.read_bytes())
    for file in sorted(files):
        with file.open("rb") as opened:
            about = os.fstat(opened.fileno())
            add(file.name, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
            add(opened.read(BEGINNING))
            add(*samples(about.st_size, lambda at: os.pread(opened.fileno(), SAMPLE, at)))
    return digest.hexdigest()[:32]


def samples(size: int, read: Callable[[int], bytes]) -> Iterable[bytes]:
    """What `read` finds at `SAMPLES` places of `size` bytes, the last of them at the end."""
    for place in range(SAMPLES):
        yield read(max(size - SAMPLE, 0) * place // (SAMPLES - 1))
