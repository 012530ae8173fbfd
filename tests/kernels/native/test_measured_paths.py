"""The path of products: what measurements lead to it, and that it stays what it was."""

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rootlace.kernels.native import linear
from rootlace.kernels.native.library import Team
from rootlace.kernels.native.linear import (
    CONFIRMED,
    LEAST_NUMBERS,
    ROWS,
    MeasuredPaths,
    ProductPath,
)
from tests.native import TWIN, library_for

BEST, VECTORS = ProductPath
SHAPE = (1024, 512, False)
FASTER, SLOWER = [0.7] * len(ROWS), [2.0] * len(ROWS)


class Start:
    """A process that begins to choose. `rounds`: what it measures, in turns."""

    def __init__(
        self, folder: Path, *rounds: list[float], code: str = "code", paths: int = 2
    ) -> None:
        self._file = folder / "library.so"
        folder.mkdir(exist_ok=True)
        self._file.write_text(code)
        self.measured = 0
        self._rounds = rounds
        library = SimpleNamespace(rl_paths=lambda _: paths, _name=str(self._file))
        self.choose = MeasuredPaths(
            cast(ctypes.CDLL, library),
            cast(Any, None),
            torch.bfloat16,
            folder / "kept",
            self._ratios,
        )

    def _ratios(self, *_: object) -> Iterator[float]:
        self.measured += 1
        yield from self._rounds[(self.measured - 1) % len(self._rounds)]


@pytest.mark.parametrize(
    ("rounds", "path", "measured"),
    [
        ([FASTER], VECTORS, CONFIRMED),
        ([SLOWER], BEST, 1),
        ([[0.9] * len(ROWS)], BEST, 1),  # faster, but not clearly
        ([[1.2, *FASTER[1:]]], BEST, 1),  # slower with many rows
        ([[*FASTER[1:], 1.2]], BEST, 1),
        ([FASTER, FASTER, SLOWER], BEST, 3),  # another program had the cores for a while
    ],
)
def test_vectors_are_taken_where_they_are_clearly_faster_again_and_again(
    tmp_path: Path, rounds: list[list[float]], path: ProductPath, measured: int
) -> None:
    start = Start(tmp_path, *rounds)
    assert start.choose(*SHAPE) == start.choose(*SHAPE) == path
    assert start.measured == measured


def test_a_choice_stays_whatever_would_be_measured_now(tmp_path: Path) -> None:
    assert Start(tmp_path, FASTER).choose(*SHAPE) == VECTORS
    later = Start(tmp_path, SLOWER)
    assert later.choose(*SHAPE) == VECTORS and later.measured == 0
    assert later.choose(1024, 512, True) == BEST  # another shape
    assert Start(tmp_path, FASTER).choose(1024, 512, True) == BEST
    assert Start(tmp_path, SLOWER).choose(*SHAPE) == VECTORS


def test_another_library_or_processor_has_choices_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Start(tmp_path, FASTER).choose(*SHAPE) == VECTORS
    assert Start(tmp_path, SLOWER, code="another").choose(*SHAPE) == BEST
    monkeypatch.setattr(linear, "kind_of_processor", lambda: "another")
    assert Start(tmp_path, SLOWER).choose(*SHAPE) == BEST


@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xfe", b'{"1024x512": "fast"}', b"[1]", b'{"1024x51']
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, damage: bytes) -> None:
    assert Start(tmp_path, FASTER).choose(*SHAPE) == VECTORS
    [file] = (tmp_path / "kept").glob("paths-*.json")
    file.write_bytes(damage)
    assert Start(tmp_path, SLOWER).choose(*SHAPE) == BEST
    assert json.loads(file.read_bytes()) == {"1024x512": "best"}


def test_what_cannot_be_kept_is_not_measured_for(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()  # no folder
    start = Start(tmp_path, FASTER)
    assert start.choose(*SHAPE) == BEST and start.measured == 0
    gone = Start(tmp_path, FASTER)
    (tmp_path / "library.so").unlink()
    assert gone.choose(*SHAPE) == BEST


def test_what_has_one_path_and_what_is_small_is_not_measured(tmp_path: Path) -> None:
    alone = Start(tmp_path, FASTER, paths=1)
    assert alone.choose(*SHAPE) == BEST and alone.measured == 0
    small = Start(tmp_path, FASTER)
    assert small.choose(LEAST_NUMBERS // 512 - 1, 512, False) == BEST and small.measured == 0


def test_a_measurement_has_a_ratio_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    library = library_for(TWIN)  # two paths on any processor
    monkeypatch.setattr(linear, "MOST_NUMBERS", 2048)
    team = Team(library, 2)
    measure = linear._Measurement(library, team, torch.bfloat16)
    for outputs, gated in ((7, False), (100, True)):
        ratios = list(measure(outputs, 64, gated))
        assert len(ratios) == len(ROWS) and min(ratios) > 0
