"""What `get_meta_info` says of an operation, under sglang's names where sglang has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rootlace.wire import protocol


def usage_meta(usage: protocol.Usage, timing: protocol.Timing) -> dict[str, Any]:
    """Tokens and seconds of an operation."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "forced_tokens": usage.forced_tokens,
        "queue_time": timing.queued,
        "time_to_first_token": timing.first_token,
        "e2e_latency": timing.total,
    }


def logprob_meta(
    kind: str, logprobs: Sequence[protocol.TokenLogprob], top: bool = False
) -> dict[str, Any]:
    """Log-probabilities as (logprob, id, text), and the best alternatives if there are some (or
    `top` says that they were asked for)."""
    meta: dict[str, Any] = {f"{kind}_token_logprobs": list(map(triple, logprobs))}
    if top or any(token.top for token in logprobs):
        meta[f"{kind}_top_logprobs"] = [
            [(logprob, token_id, text) for token_id, logprob, text in token.top]
            for token in logprobs
        ]
    return meta


def triple(token: protocol.TokenLogprob) -> tuple[float | None, int, str]:
    return (token.logprob, token.token_id, token.text)


def mean_logprob(tokens: Sequence[protocol.TokenLogprob]) -> float | None:
    values = [token.logprob for token in tokens if token.logprob is not None]
    return sum(values) / len(values) if values else None
