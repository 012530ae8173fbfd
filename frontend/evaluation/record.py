"""What is kept of a question that was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rootlace.evaluation.questions import Scored


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
