"""What a part is told, and where it puts what it finds."""

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
    """How a part is run.

    `smoke`: sizes so small that a CPU is done in a moment; the figures mean nothing. `quick`: fewer
    cases and repetitions. `ceilings` are what the part of that name measured ("copy_bandwidth" in
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
        """For how long a call is timed, all turns together."""
        return 30.0 if self.quick else 100.0

    def choose(self, full: Item, quick: Item, smoke: Item) -> Item:
        return smoke if self.smoke else quick if self.quick else full

    def share(self, achieved: float, ceiling: str) -> float | None:
        """`achieved` over the measured ceiling; None where there is none."""
        most = self.ceilings.get(ceiling)
        return achieved / most if most else None

    def synchronize(self) -> None:
        """Wait until everything enqueued on the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give freed memory back, so that others can have it. A device that has faulted has
        none."""
        gc.collect()
        if self.on_gpu:
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


class Findings:
    """A part's findings, written to `path` after every case: what stops a part in the middle does
    not take the cases before with it."""

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
        """A case that is `what` and what is put into it inside; none where nothing is. What fails
        is recorded with its error. A GPU that has faulted ends the part: nothing that this process
        measures after it would be right."""
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
    """An error in a line, with the place it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}{where}"


def has_faulted() -> bool:
    """Whether the CUDA context is unusable (after an illegal access, say)."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        return bool(torch.zeros(1, device="cuda").add_(1).item() != 1)
    except RuntimeError:
        return True
