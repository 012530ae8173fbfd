"""Evaluation of rows: ratios, targets, and printed tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.common import aim, new_table
from benchmarks.peers.measure import Row

RAW, PROGRAMS = "rootlace", "rootlace programs"
"""Ourselves, driven by raw requests and by programs of the DSL."""

LOUD = 0.1
"""Foreign cores above which a row is not to be trusted."""

SPEED_TARGETS = {"W1": 2.5, "W2": 1.5, "W3": 2.0, "W4": 1.1, "W5": 1.5}
"""How many times faster than the best peer, by wall time."""
FLOOR_TARGET = 1.5
"""Ours over the floor, on the bigger model."""
PROGRAM_TARGET = 1.03
"""Programs are not slower than raw requests; repetitions differ by about 3 %."""

Nested = dict[str, dict[str, float]]
"""By model and workload."""


@dataclass(frozen=True)
class Cell:
    """An engine's results on a workload: medians over `rows`.

    `wall`: seconds for the whole workload, scaled up by requests if the engine ran a part. `ttft`:
    for a part, that of the part, whose queue was shorter. Rows measured beside other programs
    (`LOUD`) count only if the engine has no quiet one.
    """

    rows: list[Row]
    wall: float | None
    ttft: float | None
    part: bool

    @classmethod
    def of(cls, rows: list[Row], whole: int) -> Cell:
        """Make a cell. `whole`: the workload's requests in this run."""
        rows = [row for row in rows if row.foreign_cores <= LOUD] or rows
        return cls(
            rows,
            wall=_median(row.wall_s * whole / row.requests for row in rows),
            ttft=_median(row.ttft_mean_s for row in rows),
            part=any(row.requests < whole for row in rows),
        )

    @property
    def loud(self) -> bool:
        return any(row.foreign_cores > LOUD for row in self.rows)

    def shown(self) -> str:
        if self.wall is None:
            return ""
        return f"{'~' * self.part}{self.wall:.2f}{'!' * self.loud}"


class Results:
    """All rows of a run. `floors`: by model and workload, the fields of `Floor`."""

    def __init__(self, rows: Iterable[Row], floors: Mapping[str, Mapping[str, Any]]) -> None:
        self.rows = list(rows)
        self.floors = floors
        self.models = list(dict.fromkeys(row.model for row in self.rows))
        self.workloads = list(dict.fromkeys(row.workload for row in self.rows))
        engines = dict.fromkeys(row.engine for row in self.rows)
        self.peers = [engine for engine in engines if engine not in (RAW, PROGRAMS)]

    def cell(self, model: str, workload: str, engine: str) -> Cell:
        rows = [row for row in self.rows if (row.model, row.workload) == (model, workload)]
        whole = max((row.requests for row in rows), default=0)
        return Cell.of([row for row in rows if row.engine == engine], whole)

    # ------------------------------------------------------------ ratios

    def ratios(self) -> Nested:
        """Return the best peer's wall time over ours, raw requests on both sides."""
        return self._over_ours(lambda cell: cell.wall)

    def ttft_ratios(self) -> Nested:
        """Return the lowest mean time to the first token over ours, of peers with all requests."""
        return self._over_ours(lambda cell: None if cell.part else cell.ttft)

    def _over_ours(self, what: Callable[[Cell], float | None]) -> Nested:
        def ratio(model: str, workload: str) -> float | None:
            found = [what(self.cell(model, workload, peer)) for peer in self.peers]
            best = min((value for value in found if value is not None), default=None)
            return _over(best, what(self.cell(model, workload, RAW)))

        return self._nested(ratio)

    def programs_over_raw(self) -> Nested:
        """Return our wall time with programs over that with raw requests, the median of pairs."""
        return self._nested(
            lambda model, workload: _median(
                programs.wall_s / raw.wall_s
                for raw in self.cell(model, workload, RAW).rows
                for programs in self.cell(model, workload, PROGRAMS).rows
                if programs.repetition == raw.repetition
            )
        )

    def over_floor(self, which: str = "floor_s") -> Nested:
        def ratio(model: str, workload: str) -> float | None:
            floor = self.floors.get(model, {}).get(workload, {})
            return _over(self.cell(model, workload, RAW).wall, floor.get(which))

        return self._nested(ratio)

    def same_tokens(self) -> Nested:
        """Return the share of requests whose programs gave the same tokens as raw requests. In
        bfloat16 a kernel whose sums depend on the batch may decide a near tie otherwise."""

        def share(model: str, workload: str) -> float | None:
            mine = [row for row in self.rows if (row.model, row.workload) == (model, workload)]
            raw = {row.repetition: row.outputs for row in mine if row.engine == RAW}
            shares = [
                sum(row.outputs.get(name) == tokens for name, tokens in other.items()) / len(other)
                for row in mine
                if row.engine == PROGRAMS and (other := raw.get(row.repetition))
            ]
            return statistics.fmean(shares) if shares else None

        return self._nested(share)

    def _nested(self, ratio: Callable[[str, str], float | None]) -> Nested:
        found: Nested = {}
        for model in self.models:
            values = {workload: ratio(model, workload) for workload in self.workloads}
            found[model] = {name: value for name, value in values.items() if value is not None}
        return found

    # ------------------------------------------------------------ targets

    def targets(self) -> list[dict[str, Any]]:
        """Return each target with the result, and whether it is met (None: not measured)."""
        aims = {
            "speed": (self.ratios(), ">=", SPEED_TARGETS),
            "ttft": (self.ttft_ratios(), ">=", dict.fromkeys(self.workloads, 1.0)),
            "programs": (
                *(self.programs_over_raw(), "<="),
                dict.fromkeys(self.workloads, PROGRAM_TARGET),
            ),
            "floor": (self.over_floor(), "<=", dict.fromkeys(self.workloads, FLOOR_TARGET)),
        }
        return [
            {"what": what, "model": model, "workload": workload}
            | aim(values[model].get(workload), sign, bounds[workload])
            for model in self.models
            for workload in self.workloads
            for what, (values, sign, bounds) in aims.items()
            if what != "floor" or model.startswith("b")
        ]

    # ------------------------------------------------------------ output

    def tables(self, model: str) -> Iterator[Table]:
        """Return a line per workload: each engine's time, and the ratios."""
        ratios = {
            "ratio": self.ratios(),
            "programs": self.programs_over_raw(),
            "over floor": self.over_floor(),
            "all flops": self.over_floor("arithmetic_s"),
        }
        yield self._table(f"Model {model}: wall time in seconds", model, Cell.shown, ratios)
        yield self._table(
            f"Model {model}: mean time to the first token in ms",
            model,
            lambda cell: "" if cell.ttft is None else f"{cell.ttft * 1e3:.0f}",
            {"ratio": self.ttft_ratios()},
        )

    def _table(
        self, title: str, model: str, shown: Callable[[Cell], str], ratios: Mapping[str, Nested]
    ) -> Table:
        engines = (RAW, *self.peers)
        table = new_table(title, "", *engines, *ratios)
        for workload in self.workloads:
            cells = [shown(self.cell(model, workload, engine)) for engine in engines]
            found = [values[model].get(workload) for values in ratios.values()]
            cells += ["" if value is None else f"{value:.2f}x" for value in found]
            table.add_row(workload, *cells)
        return table

    def remarks(self) -> Iterator[str]:
        """Return remarks for readers of the tables."""
        cells = {
            peer: [self.cell(model, work, peer) for model in self.models for work in self.workloads]
            for peer in self.peers
        }
        if parts := [peer for peer, found in cells.items() if any(cell.part for cell in found)]:
            yield (
                f"~ {', '.join(parts)} did a part of the requests: the wall time is scaled up to "
                "all of them, time to the first token and cached tokens are those of the part"
            )
        if fixed := sorted({row.engine for row in self.rows if row.fixed_replies}):
            yield (
                f"{', '.join(fixed)} does not tell token ids: follow-ups of W2 and W3 hold "
                "stand-ins, which its cache cannot have"
            )
        if loud := [row.foreign_cores for row in self.rows if row.foreign_cores > LOUD]:
            yield (
                f"! other programs kept more than {LOUD} cores busy in {len(loud)} of "
                f"{len(self.rows)} runs (up to {max(loud):.1f}): "
                "such figures count only where there are no quiet ones"
            )

    def summary(self) -> Iterator[str]:
        """Return the remarks, the number of targets met, and each target missed."""
        yield from self.remarks()
        shares = [share for found in self.same_tokens().values() for share in found.values()]
        least = min(shares, default=0.0)
        yield f"programs got the tokens of raw requests in at least {least:.1%} of the requests"
        targets = [target for target in self.targets() if target["met"] is not None]
        yield f"{sum(target['met'] for target in targets)} of {len(targets)} targets met"
        for t in targets:
            if not t["met"]:
                where = f"{t['what']} {t['model']} {t['workload']}"
                yield f"  {where}: {t['value']:.2f}, not {t['target']}"


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
