"""What counts as right: likelihoods of choices, and texts that were written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rootlace.evaluation.task import Extract, Match


class Scored(msgspec.Struct, frozen=True):
    """A choice: its text, the sum of its tokens' log-probabilities behind the prompt, their number,
    and that sum behind nothing, if it was asked for."""

    text: str
    log_likelihood: float
    tokens: int
    alone: float | None = None


METRICS: dict[str, Callable[[Scored], float]] = {
    "acc": lambda one: one.log_likelihood,
    "acc_norm": lambda one: one.log_likelihood / (len(one.text) or 1),
    "acc_bytes": lambda one: one.log_likelihood / (len(one.text.encode()) or 1),
    "acc_tokens": lambda one: one.log_likelihood / one.tokens,
    "acc_mutual_info": lambda one: one.log_likelihood - (one.alone or 0.0),
}
"""By what the choices are compared: by their likelihood; per character; per byte; per token; less
what the choice is worth without the question (pointwise mutual information)."""


def chosen(metric: str, scored: Sequence[Scored]) -> int:
    """The number of the best choice; of equals, the first."""
    values = [METRICS[metric](one) for one in scored]
    return values.index(max(values))


def extracted(response: str, extract: Extract | None) -> str | None:
    """What is taken out of a response; None where the pattern finds nothing."""
    if extract is None:
        return response.strip()
    found = list(re.finditer(extract.pattern, response))
    if not found:
        return None
    match = found[0 if extract.take == "first" else -1]
    return next((group for group in match.groups() if group), match[0]).strip()


def matches(text: str | None, expected: str, match: Match) -> bool:
    """Whether a text is the expected one."""
    return text is not None and plain(text, match) == plain(expected, match)


def plain(text: str, match: Match) -> str:
    """What of a text is compared."""
    for pattern in match.ignore:
        text = re.sub(pattern, "", text)
    return (text.lower() if match.ignore_case else text).strip()


def by_extract(response: str, extracts: Mapping[str, Extract]) -> dict[str, str | None]:
    """By metric, what was taken out of a response; the whole one where nothing is to be."""
    if not extracts:
        return {"exact_match": extracted(response, None)}
    return {name: extracted(response, one) for name, one in extracts.items()}
