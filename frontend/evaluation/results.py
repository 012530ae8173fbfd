"""What came out of a run, and its folder: `run.json` and a line of `rows.jsonl` for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rootlace.evaluation.questions import Estimate, Scored, estimate
from rootlace.wire.errors import InvalidRequest


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What came of a question: a line of the run's file. `scores` has 1 or 0 (or what lies between)
    by metric; the tokens are those of all that the row asked, without those of votes that were
    cancelled because others had won."""

    id: str
    group: str = ""
    prompt: str
    scores: dict[str, float]
    choices: list[str] = []
    answer: int = -1
    log_likelihoods: list[float] = []
    tokens: list[int] = []
    alone: list[float] = []
    expected: str = ""
    response: str = ""
    extracted: dict[str, str | None] = {}
    verdict: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def scored(self) -> list[Scored]:
        """The choices as they were scored."""
        alone: Sequence[float | None] = self.alone or [None] * len(self.choices)
        rows = zip(self.choices, self.log_likelihoods, self.tokens, alone, strict=True)
        return [Scored(*row) for row in rows]

    def count(self, metas: Sequence[Mapping[str, Any]]) -> None:
        """Add the tokens of what was asked."""
        for meta in metas:
            self.prompt_tokens += meta["prompt_tokens"]
            self.cached_tokens += meta["cached_tokens"]
            self.completion_tokens += meta["completion_tokens"]


ABOUT, ROWS = "run.json", "rows.jsonl"


@dataclass
class Results:
    """The rows of a run in their order, and (id, reason) of those that failed. `seconds` is how
    long the last `asked` rows took; the others were there from before."""

    task: str
    model: str
    records: list[Record] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    asked: int = 0

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.records for name in record.scores))

    def estimates(self) -> dict[str, Estimate]:
        """By metric."""
        return {name: _estimate(self.records, name) for name in self.metrics}

    def by_group(self) -> dict[str, dict[str, Estimate]]:
        """By group, and by metric; empty where the task has no groups."""
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            groups.setdefault(record.group, []).append(record)
        if len(groups) < 2:
            return {}
        return {
            group: {name: _estimate(records, name) for name in self.metrics}
            for group, records in sorted(groups.items())
        }

    @property
    def prompt_tokens(self) -> int:
        return sum(record.prompt_tokens for record in self.records)

    @property
    def cached_tokens(self) -> int:
        return sum(record.cached_tokens for record in self.records)

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that was not computed."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def summary(self) -> dict[str, Any]:
        """All but the rows, as JSON can hold it."""
        return {
            "task": self.task,
            "model": self.model,
            "rows": len(self.records),
            "metrics": msgspec.to_builtins(self.estimates()),
            "groups": msgspec.to_builtins(self.by_group()),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": sum(record.completion_tokens for record in self.records),
            "seconds": self.seconds,
            "asked": self.asked,
            "failures": self.failures,
        }


def _estimate(records: Sequence[Record], metric: str) -> Estimate:
    return estimate([record.scores[metric] for record in records if metric in record.scores])


class _Kept(msgspec.Struct):
    row: int
    value: Record


def _kept(lines: bytes) -> Iterator[tuple[int, Record]]:
    """(number, record) for each line; one that was cut off was asked again, and is another line."""
    for line in lines.splitlines():
        try:
            kept = msgspec.json.decode(line, type=_Kept)
        except msgspec.DecodeError:
            continue
        yield kept.row, kept.value


def read_results(folder: Path) -> Results:
    """Those of a run's folder. Raises InvalidRequest where it is none."""
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes())
        summary = about["results"]
        asked = summary["rows"] + len(summary["failures"])
        rows = _kept((folder / ROWS).read_bytes())
        kept = {row: record for row, record in rows if row < asked}  # a limit was higher before
        if len(kept) < summary["rows"]:
            raise InvalidRequest(f"{folder} holds {len(kept)} of {summary['rows']} rows")
        return Results(
            summary["task"],
            summary["model"],
            [kept[row] for row in sorted(kept)],
            [(id, reason) for id, reason in summary["failures"]],
            summary["seconds"],
            summary["asked"],
        )
    except KeyError as error:
        raise InvalidRequest(f"the run in {folder} has not ended: it has no {error}") from None
    except (OSError, msgspec.MsgspecError, TypeError) as error:
        raise InvalidRequest(f"{folder} holds no run: {error}") from None
