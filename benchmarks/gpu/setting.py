"""Input and output of a part."""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from rootlace.kernels.dispatch import kernels_for
from rootlace.kernels.interface import KernelSet

Item = TypeVar("Item")


@dataclass(frozen=True)
class Setting:
    """Options of a part.

    `smoke`: sizes so small that a CPU needs only a moment; the figures mean nothing. `quick`: fewer
    cases and repetitions. `ceilings`: results of the part of that name ("copy_bandwidth" in
    bytes/s, "matmul_rate" in FLOP/s); empty if it was not run.
    """

    device: torch.device
    smoke: bool = False
    quick: bool = False
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def kernels(self) -> KernelSet:
        return kernels_for(self.device)

    @property
    def milliseconds(self) -> float:
        """Return how long a call is timed, all turns together."""
        return 30.0 if self.quick else 100.0

    def choose(self, full: Item, quick: Item, smoke: Item) -> Item:
        return smoke if self.smoke else quick if self.quick else full

    def share(self, achieved: float, ceiling: str) -> float | None:
        """Return `achieved` over the measured ceiling; None if there is none."""
        most = self.ceilings.get(ceiling)
        return achieved / most if most else None

    def synchronize(self) -> None:
        """Wait until all work enqueued on the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give freed memory back to other processes. A device that has faulted has none."""
        gc.collect()
        if self.on_gpu:
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


class Findings:
    """Findings of a part, written to `path` after every case, so that an abort loses only the
    present case."""

    def __init__(self, path: Path | None = None) -> None:
        self.result: dict[str, Any] = {"cases": []}
        self._path = path

    def add(self, case: dict[str, Any]) -> None:
        self.result["cases"].append(case)
        self._write()

    def set(self, name: str, value: Any) -> None:
        self.result[name] = value
        self._write()

    @contextmanager
    def attempt(self, **what: Any) -> Iterator[dict[str, Any]]:
        """Add a case `what` with the findings put into it inside the block, if any. A failure is
        recorded with its error. After a fault of the GPU the part ends: this process's later
        measurements would be wrong."""
        case: dict[str, Any] = dict(what)
        try:
            yield case
        except Exception as error:
            self.add({**what, "error": describe(error)})
            if has_faulted():
                raise
        else:
            if len(case) > len(what):
                self.add(case)

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.result))


def describe(error: BaseException) -> str:
    """Describe an error in a line, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{where}"


def has_faulted() -> bool:
    """Whether the CUDA context is unusable, for example after an illegal access."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        return bool(torch.zeros(1, device="cuda").add_(1).item() != 1)
    except RuntimeError:
        return True
