"""The path of products with a weight where there are two: measured by its shape, once per machine.

The two add up in different orders, so that a choice has to stay: it is kept in a file beside the
compiled libraries, one for each library and kind of processor.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from rootlace.kernels.native.build import default_cache, kind_of_processor, note_use, write_whole
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.linear import DTYPES, Epilogue, PackedLinear, ProductPath
from rootlace.kernels.weights import Dense

LEAST_NUMBERS = 1 << 18
"""Products with smaller weights take too little time to matter."""
MOST_NUMBERS = 1 << 21
"""Of a larger weight, so many are measured."""
ROWS = (256, 16, 1)
"""Rows of the products that are measured. All go the path that is chosen."""
TURNS = 3
"""How often each path is tried with each number of rows, in turns; its fastest try counts."""
MARGIN, AT_MOST = 0.85, 1.05
"""The other path is taken if its time is `MARGIN` of the best instructions' in the mean of all
`ROWS`, and with none more than `AT_MOST` of it, `CONFIRMED` times in a row: what another program
does meanwhile is not to be kept for a long time."""
CONFIRMED = 3

Name = Literal["best", "vectors"]
Ratios = Callable[[int, int, bool], Iterator[float]]
"""Of a shape: the time on vectors over the best instructions', with each of `ROWS`."""

log = logging.getLogger(__name__)


class MeasuredPaths:
    """A `ChoosePath`. Where a choice cannot be kept, the best instructions are taken."""

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Team,
        dtype: torch.dtype,
        folder: Path | None = None,
        ratios: Ratios | None = None,
    ) -> None:
        """`folder`: where choices are kept, None: beside the compiled libraries. `ratios` measures;
        None: with the threads of `team`."""
        self._one_path = library.rl_paths(DTYPES[dtype]) == 1
        self._library = library
        self._folder = folder or default_cache()
        self._ratios = ratios or _Measurement(library, team, dtype)
        self._known: dict[str, Name] = {}

    def __call__(self, outputs: int, inputs: int, gated: bool) -> ProductPath:
        if self._one_path or outputs * inputs < LEAST_NUMBERS:
            return ProductPath.BEST
        shape = f"{outputs}x{inputs}" + (" gated" if gated else "")
        if shape not in self._known:
            try:
                self._choose(shape, outputs, inputs, gated)
            except (OSError, MemoryError) as error:
                log.warning("the path of products is not measured: %s", error)
                self._known[shape] = "best"
        return ProductPath[self._known[shape].upper()]

    def _choose(self, shape: str, outputs: int, inputs: int, gated: bool) -> None:
        file = kept_in(self._library, self._folder)
        self._known |= kept(file)
        if shape in self._known:
            note_use(file)
            return
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(file.parent / "paths.lock"):  # processes that start at once choose the same
            known = kept(file)
            if shape not in known:
                known[shape] = self._chosen(outputs, inputs, gated)
                write_whole(file, json.dumps(known).encode())
        self._known |= known
        log.info("the path of products with weights of %s: %s", shape, known[shape])

    def _chosen(self, outputs: int, inputs: int, gated: bool) -> Name:
        for _ in range(CONFIRMED):
            found: list[float] = []
            for ratio in self._ratios(outputs, inputs, gated):
                if ratio > AT_MOST:
                    return "best"
                found.append(ratio)
            if sum(found) > MARGIN * len(found):
                return "best"
        return "vectors"


def kept_in(library: ctypes.CDLL, folder: Path) -> Path:
    """The file of a library's choices. Raises OSError where the library is no file any more."""
    code = hashlib.sha256(Path(library._name).read_bytes()).hexdigest()
    digest = hashlib.sha256(f"{code} {kind_of_processor()}".encode()).hexdigest()[:16]
    return folder / f"paths-{digest}.json"


def kept(file: Path) -> dict[str, Name]:
    """What was chosen, by shape; nothing where the file is damaged or missing."""
    try:
        found = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {shape: name for shape, name in found.items() if name in ("best", "vectors")}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Measurement:
    """See `Ratios`."""

    def __init__(self, library: ctypes.CDLL, team: Team, dtype: torch.dtype) -> None:
        self._library, self._team, self._dtype = library, team, dtype

    def __call__(self, outputs: int, inputs: int, gated: bool) -> Iterator[float]:
        outputs = min(outputs, MOST_NUMBERS // inputs // 2 * 2 or 2)
        weight = Dense(self._numbers(outputs, inputs))
        packed = {
            path: PackedLinear(
                self._library, self._team, weight, self._dtype, gated=gated, path=path
            )
            for path in ProductPath
        }
        epilogue = Epilogue.SILU_MUL if gated else Epilogue.STORE
        for rows in ROWS:
            x = self._numbers(rows, inputs)
            out = torch.empty(rows, outputs // (2 if gated else 1), dtype=self._dtype)
            least = dict.fromkeys(ProductPath, float("inf"))
            for _ in range(TURNS):
                for path, linear in packed.items():
                    start = time.perf_counter()
                    linear.multiply(epilogue, x, out)
                    least[path] = min(least[path], time.perf_counter() - start)
                ratio = least[ProductPath.VECTORS] / least[ProductPath.BEST]
                if ratio > AT_MOST:  # the other path is not taken: no need to be sure
                    break
            yield ratio

    def _numbers(self, rows: int, columns: int) -> torch.Tensor:
        """Products of zeros would take less time."""
        some = torch.randn(1 << 12, generator=torch.Generator().manual_seed(0)).to(self._dtype)
        return some.repeat(rows * columns // len(some) + 1)[: rows * columns].view(rows, columns)
