"""Evaluation of the turns: medians, ratios, hit rates, targets, the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from rich.table import Table

from benchmarks.common import aim, new_table
from benchmarks.programs.measure import Turn

ROOTLACE, CACHE_OFF = "rootlace", "rootlace, cache off"
PEER = "vllm"
MEAN, LEAST, HITS = 2.5, 1.0, 0.96
"""What is aimed at: geometric mean and least of the throughput over the peer's; share of the best
possible hit rate."""


@dataclass(frozen=True)
class Found:
    """Medians of one engine on one workload. `throughput`: programs per second; the ratios are
    medians of those within the repetitions, ours over theirs: above 1 ours is better. Hit rates are
    over all repetitions."""

    programs: int
    throughput: float
    latency_s: float
    throughput_ratio: float
    latency_ratio: float
    hit_rate: float
    ideal_hit_rate: float
    output_tokens: int
    prompt_tokens: int
    repetitions: int
    foreign_cores: float


def found_of(turns: Sequence[Turn]) -> dict[str, dict[str, Found]]:
    """Return results by workload and engine."""
    ours = {(t.workload, t.repetition): t for t in turns if t.engine == ROOTLACE}
    found: dict[str, dict[str, Found]] = {}
    for workload in dict.fromkeys(turn.workload for turn in turns):
        for engine in dict.fromkeys(turn.engine for turn in turns):
            mine = [t for t in turns if (t.workload, t.engine) == (workload, engine)]
            if mine:
                known = [t for t in mine if (t.workload, t.repetition) in ours]
                pairs = [(ours[t.workload, t.repetition], t) for t in known]
                found.setdefault(workload, {})[engine] = _found(mine, pairs)
    return found


def _found(mine: Sequence[Turn], pairs: Sequence[tuple[Turn, Turn]]) -> Found:
    prompt = sum(turn.prompt_tokens for turn in mine)
    asked = prompt if mine[0].engine != PEER else sum(turn.engine_prompt_tokens for turn in mine)
    return Found(
        programs=mine[0].programs,
        throughput=median(1 / turn.each_s for turn in mine),
        latency_s=median(turn.latency_s for turn in mine),
        throughput_ratio=median(theirs.each_s / our.each_s for our, theirs in pairs),
        latency_ratio=median(theirs.latency_s / our.latency_s for our, theirs in pairs),
        hit_rate=1 - sum(turn.computed_tokens for turn in mine) / asked,
        ideal_hit_rate=1 - sum(turn.ideal_computed_tokens for turn in mine) / prompt,
        output_tokens=mine[0].output_tokens,
        prompt_tokens=mine[0].engine_prompt_tokens,
        repetitions=len(mine),
        foreign_cores=max(turn.foreign_cores for turn in mine),
    )


def targets_of(found: Mapping[str, Mapping[str, Found]]) -> dict[str, Any]:
    """Return the targets; those beside the peer are not measured without a peer."""
    ratios = [engines[PEER].throughput_ratio for engines in found.values() if PEER in engines]
    hits = [_hit_share(engines[ROOTLACE]) for engines in found.values()]
    return {
        "throughput over vLLM's, geometric mean": aim(
            geometric_mean(ratios) if ratios else None, ">=", MEAN
        ),
        "throughput over vLLM's, least": aim(min(ratios, default=None), ">=", LEAST),
        "share of the best possible hit rate, least": aim(min(hits, default=None), ">=", HITS),
    }


def _hit_share(found: Found) -> float:
    return found.hit_rate / found.ideal_hit_rate if found.ideal_hit_rate > 0 else 1.0


def table_of_found(found: Mapping[str, Mapping[str, Found]]) -> Table:
    table = new_table(
        "Programs",
        *("", "prog/s", "off, x", "vLLM, x", "alone, s", "off, x", "vLLM, x"),
        *("hits", "best", "vLLM's"),
    )

    for workload, engines in found.items():
        ours, peer = engines[ROOTLACE], engines.get(PEER)
        others = [engines.get(name) for name in (CACHE_OFF, PEER)]
        table.add_row(
            workload,
            f"{ours.throughput:.2f}",
            *(f"{one.throughput_ratio:.2f}" if one else "" for one in others),
            f"{ours.latency_s:.3f}",
            *(f"{one.latency_ratio:.2f}" if one else "" for one in others),
            *(f"{ours.hit_rate:.1%}", f"{ours.ideal_hit_rate:.1%}"),
            f"{peer.hit_rate:.1%}" if peer else "",
        )
    return table
