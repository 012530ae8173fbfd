"""Cost models of engines, and how long a simulated step takes by one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rootlace.runtime.contracts.step_cost import BadCost, StepCost

_FOLDER = Path(__file__).parent / "costs"

DEFAULT_COST = "h200_8b_roofline"


def known_costs() -> list[str]:
    """Names of the built-in models."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_cost(given: str) -> StepCost:
    """The cost model of a name (`known_costs`) or of a JSON file; further keys are ignored.

    Raises BadCost, or OSError if the file cannot be read.
    """
    path = Path(given)
    if given in known_costs():
        path = _FOLDER / f"{given}.json"
    elif not path.is_file():
        known = ", ".join(known_costs())
        raise BadCost(f"{given} is neither a file nor a known cost model ({known})")
    try:
        return msgspec.convert(msgspec.json.decode(path.read_bytes()), StepCost)
    except (msgspec.MsgspecError, BadCost) as error:
        raise BadCost(f"{path}: {error}") from error


@dataclass(frozen=True)
class StepTimes:
    """When each part of a step is ready, in seconds from its beginning."""

    total: float
    chunks: np.ndarray
    rows: np.ndarray
    steps: int
    """Steps of the engine that the simulated one stands for."""


def time_step(
    cost: StepCost,
    chunk_tokens: np.ndarray,
    chunk_ends: np.ndarray,
    row_tokens: np.ndarray,
    row_contexts: np.ndarray,
) -> StepTimes:
    """A simulated step: a run of as many engine steps as it takes.

    Chunks of `chunk_tokens` that end at position `chunk_ends` are computed one after the other in
    what decode rows leave of the budget; decode row i takes part in the first `row_tokens[i]` steps
    and has about `row_contexts[i]` tokens of context. Where every entry of `row_tokens` is 1 and
    the chunks fit the budget, this is one engine step and nothing is approximate. Otherwise the
    cost of decode rows is spread evenly over the run.
    """
    decoding = float(np.dot(row_tokens, cost.decode + cost.context * row_contexts))
    longest = int(row_tokens.max(initial=0))
    if not len(chunk_tokens):
        steps = max(longest, 1)
        total = cost.step * steps + decoding
        return StepTimes(total, np.empty(0), row_tokens * (total / steps), steps)
    room = max(cost.max_step_tokens - len(row_tokens), 1)
    computed = np.cumsum(chunk_tokens)
    spent = np.cumsum(chunk_tokens * (cost.prefill + cost.pair * (chunk_ends - chunk_tokens / 2)))
    needed = -(-computed // room)
    steps = max(int(needed[-1]), longest)
    tokens_by, spent_by = np.append(0, computed), np.append(0.0, spent)

    def until(step: np.ndarray) -> np.ndarray:
        """Seconds that the first `step` steps take."""
        prompts = np.interp(step * room, tokens_by, spent_by)
        return cost.step * step + decoding * (step / steps) + prompts

    total = float(until(np.array([steps]))[0])
    return StepTimes(total, until(needed), until(row_tokens), steps)
