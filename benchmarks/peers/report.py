"""What the rows say: ratios, targets, and the table that is printed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.common import new_table
from benchmarks.peers.measure import Row

RAW, PROGRAMS = "rootlace", "rootlace programs"
"""Ourselves, driven by raw requests and by programs of the DSL."""
OURS = (RAW, PROGRAMS)

LOUD = 0.1
"""Foreign cores above which a row is not to be trusted."""

SPEED_TARGETS = {"W1": 2.5, "W2": 1.5, "W3": 2.0, "W4": 1.1, "W5": 1.5}
"""How many times faster than the best peer, by wall time."""
FLOOR_TARGET = 1.5
"""Ours over the floor, on the bigger model."""
PROGRAM_TARGET = 1.0
PROGRAM_NOISE = 0.03
"""Programs are not slower than raw requests; repetitions differ by about this much."""

Nested = dict[str, dict[str, float]]


class Results:
    """All rows of a run, looked up by model and workload. Medians are over repetitions.

    A row that was measured beside other programs (`LOUD`) counts only where the engine has no quiet
    one for that workload.
    """

    def __init__(self, rows: Iterable[Row], floors: Mapping[str, Mapping[str, Any]]) -> None:
        self.rows = list(rows)
        self.floors = floors
        self.models = list(dict.fromkeys(row.model for row in self.rows))
        self.workloads = list(dict.fromkeys(row.workload for row in self.rows))
        self.engines = list(dict.fromkeys(row.engine for row in self.rows))

    @property
    def peers(self) -> list[str]:
        return [engine for engine in self.engines if engine not in OURS]

    def counted(self, model: str, workload: str, engine: str) -> list[Row]:
        found = [
            row
            for row in self.rows
            if (row.model, row.workload, row.engine) == (model, workload, engine)
        ]
        return [row for row in found if row.foreign_cores <= LOUD] or found

    def wall(self, model: str, workload: str, engine: str) -> float | None:
        """Seconds for the whole workload. Who did a part of it is scaled up by its requests."""
        whole = self._whole(model, workload)
        return _median(
            row.wall_s * whole / row.requests for row in self.counted(model, workload, engine)
        )

    def ttft(self, model: str, workload: str, engine: str) -> float | None:
        """Of who did a part of the workload, that of the part: its queue was shorter."""
        return _median(row.ttft_mean_s for row in self.counted(model, workload, engine))

    def cached(self, model: str, workload: str, engine: str) -> float | None:
        return _median(row.cached_tokens for row in self.counted(model, workload, engine))

    def part(self, model: str, workload: str, engine: str) -> bool:
        """Whether it did only a part of the workload."""
        whole = self._whole(model, workload)
        return any(row.requests < whole for row in self.counted(model, workload, engine))

    def _whole(self, model: str, workload: str) -> int:
        """Requests of the workload as this run has it."""
        return max(
            row.requests for row in self.rows if (row.model, row.workload) == (model, workload)
        )

    def loud(self, model: str, workload: str, engine: str) -> bool:
        return any(row.foreign_cores > LOUD for row in self.counted(model, workload, engine))

    def best_peer(self, model: str, workload: str, what: Callable[..., float | None]) -> str | None:
        found = {peer: what(model, workload, peer) for peer in self.peers}
        known = {peer: value for peer, value in found.items() if value is not None}
        return min(known, key=lambda peer: known[peer]) if known else None

    # ------------------------------------------------------------ ratios

    def ratios(self) -> Nested:
        """The best peer's wall time over ours, raw requests on both sides."""
        return self._over_ours(self.wall)

    def ttft_ratios(self) -> Nested:
        """The lowest mean time to the first token over ours, of peers that did all requests."""

        def whole(model: str, workload: str, engine: str) -> float | None:
            if self.part(model, workload, engine):
                return None
            return self.ttft(model, workload, engine)

        return self._over_ours(whole)

    def _over_ours(self, what: Callable[..., float | None]) -> Nested:
        def ratio(model: str, workload: str) -> float | None:
            peer = self.best_peer(model, workload, what)
            return _over(what(model, workload, peer) if peer else None, what(model, workload, RAW))

        return self._nested(ratio)

    def programs_over_raw(self) -> Nested:
        """Our wall time driven by programs over that by raw requests, the median of pairs."""

        def ratio(model: str, workload: str) -> float | None:
            raw = {row.repetition: row for row in self.counted(model, workload, RAW)}
            pairs = [
                row.wall_s / raw[row.repetition].wall_s
                for row in self.counted(model, workload, PROGRAMS)
                if row.repetition in raw
            ]
            return _median(pairs)

        return self._nested(ratio)

    def over_floor(self, which: str = "floor_s") -> Nested:
        def ratio(model: str, workload: str) -> float | None:
            floor = self.floors.get(model, {}).get(workload)
            return _over(self.wall(model, workload, RAW), floor[which] if floor else None)

        return self._nested(ratio)

    def _nested(self, ratio: Callable[[str, str], float | None]) -> Nested:
        found: Nested = {}
        for model in self.models:
            values = {workload: ratio(model, workload) for workload in self.workloads}
            found[model] = {name: value for name, value in values.items() if value is not None}
        return found

    # ------------------------------------------------------------ targets

    def targets(self) -> list[dict[str, Any]]:
        """Each aim with what was found, and whether it is met (None: not measured)."""
        aims: list[tuple[str, Nested, Callable[[str], float], bool]] = [
            ("speed", self.ratios(), lambda workload: SPEED_TARGETS[workload], False),
            ("ttft", self.ttft_ratios(), lambda _: 1.0, False),
            ("programs", self.programs_over_raw(), lambda _: PROGRAM_TARGET + PROGRAM_NOISE, True),
            ("floor", self.over_floor(), lambda _: FLOOR_TARGET, True),
        ]
        return [
            _target(what, model, workload, bound(workload), found[model].get(workload), at_most)
            for model in self.models
            for workload in self.workloads
            for what, found, bound, at_most in aims
            if what != "floor" or model.startswith("b")
        ]

    # ------------------------------------------------------------ tables

    def wall_table(self, model: str) -> Table:
        """A line per workload: seconds of each engine, what follows from them, and the floors."""
        columns = (RAW, *self.peers, "ratio", "programs", "floor", "over it", "all flops", "over")
        table = new_table(f"Model {model}: wall time in seconds", "", *columns)
        ratios, programs = self.ratios()[model], self.programs_over_raw()[model]
        over, over_flops = self.over_floor()[model], self.over_floor("arithmetic_s")[model]
        for workload in self.workloads:
            floor = self.floors.get(model, {}).get(workload)
            table.add_row(
                workload,
                *(self._wall_cell(model, workload, engine) for engine in (RAW, *self.peers)),
                _times(ratios.get(workload)),
                _times(programs.get(workload)),
                f"{floor['floor_s']:.3f}" if floor else "",
                _times(over.get(workload)),
                f"{floor['arithmetic_s']:.3f}" if floor else "",
                _times(over_flops.get(workload)),
            )
        return table

    def ttft_table(self, model: str) -> Table:
        columns = (RAW, *self.peers, "ratio")
        table = new_table(f"Model {model}: mean time to the first token in ms", "", *columns)
        ratios = self.ttft_ratios()[model]
        for workload in self.workloads:
            values = [self.ttft(model, workload, engine) for engine in (RAW, *self.peers)]
            cells = ["" if value is None else f"{value * 1e3:.0f}" for value in values]
            table.add_row(workload, *cells, _times(ratios.get(workload)))
        return table

    def cache_table(self, model: str) -> Table:
        """Prompt tokens that came from the cache, beside what an unlimited one could have had."""
        columns = (*self.engines, "possible", "prompt")
        table = new_table("Prompt tokens from the cache", "", *columns)
        for workload in self.workloads:
            rows = self.counted(model, workload, RAW)
            floor = self.floors.get(model, {}).get(workload)
            prompt = rows[0].prompt_tokens if rows else None
            possible = prompt - floor["distinct_prompt_tokens"] if prompt and floor else None
            cells = [
                self._part_mark(model, workload, engine)
                + _count(self.cached(model, workload, engine))
                for engine in self.engines
            ]
            table.add_row(workload, *cells, _count(possible), _count(prompt))
        return table

    def _wall_cell(self, model: str, workload: str, engine: str) -> str:
        wall = self.wall(model, workload, engine)
        if wall is None:
            return ""
        noise = "!" if self.loud(model, workload, engine) else ""
        return f"{self._part_mark(model, workload, engine)}{wall:.2f}{noise}"

    def _part_mark(self, model: str, workload: str, engine: str) -> str:
        return "~" if self.part(model, workload, engine) else ""

    def remarks(self) -> list[str]:
        """What a reader of the tables must know."""
        remarks = []
        parts = [
            engine
            for engine in self.engines
            if any(self.part(m, w, engine) for m in self.models for w in self.workloads)
        ]
        if parts:
            remarks.append(
                f"~ {', '.join(parts)} did a part of the requests: the wall time is scaled up to "
                "all of them, time to the first token and cached tokens are those of the part"
            )
        fixed = sorted({row.engine for row in self.rows if row.fixed_replies})
        if fixed:
            remarks.append(
                f"{', '.join(fixed)} does not tell token ids: follow-ups of W2 and W3 hold "
                "stand-ins, which its cache cannot have"
            )
        loud = [row for row in self.rows if row.foreign_cores > LOUD]
        if loud:
            remarks.append(
                f"! other programs kept more than {LOUD} cores busy in {len(loud)} of "
                f"{len(self.rows)} runs (up to {max(r.foreign_cores for r in loud):.1f}): "
                "such figures count only where there are no quiet ones"
            )
        return remarks


def _target(
    what: str,
    model: str,
    workload: str,
    bound: float,
    value: float | None,
    at_most: bool = False,
) -> dict[str, Any]:
    met = None
    if value is not None:
        met = value <= bound if at_most else value >= bound
    return {
        "what": what,
        "model": model,
        "workload": workload,
        "target": f"{'<=' if at_most else '>='} {bound:g}",
        "value": value,
        "met": met,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def met_line(targets: Sequence[Mapping[str, Any]]) -> str:
    """One line about all targets, and one per missed one."""
    met = sum(1 for target in targets if target["met"])
    known = sum(1 for target in targets if target["met"] is not None)
    lines = [f"{met} of {known} targets met"]
    lines += [
        f"  {t['what']} {t['model']} {t['workload']}: {t['value']:.2f}, not {t['target']}"
        for t in targets
        if t["met"] is False
    ]
    return "\n".join(lines)
