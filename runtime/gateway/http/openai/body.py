"""What the bodies of OpenAI's endpoints have in common.

Every field may be null, which means its default. Fields that clients send and that do not change
what a text model answers are typed and then ignored; any other unknown field is refused, because a
misspelt parameter that does nothing is worse than an error.
"""

from __future__ import annotations

from typing import Annotated, Any

from rootlace.runtime.gateway.http.body import Body
from rootlace.runtime.gateway.http.constraints import OpenAIConstraintBody
from rootlace.runtime.gateway.http.errors import InvalidParameter
from rootlace.runtime.gateway.http.fields import ignored, refused
from rootlace.wire.handling import Cache, Priority, Seconds

ACCOUNT = ignored("it is about the account of OpenAI's clients")
CACHE = ignored("every prompt is cached")
_NO_BEAMS = "there is no beam search"


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, ignored("nothing is obfuscated")] = None
    continuous_usage_stats: Annotated[
        bool | None, refused("the usage comes at the end, by include_usage")
    ] = None


class SamplingBody(OpenAIConstraintBody):
    """What completions and chat completions share, but for what `with_sampling` adds."""

    model: str | None = None
    max_tokens: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    adapter: str | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None
    request_id: str | None = None
    # Those of a `HandlingBody`: a struct cannot have two others for its bases.
    priority: Priority | None = None
    timeout: Seconds | None = None
    cache: Cache | None = None

    guided_decoding_backend: Annotated[str | None, ignored("the server chose its backend")] = None
    user: Annotated[str | None, ACCOUNT] = None
    metadata: Annotated[dict[str, str] | None, ACCOUNT] = None
    store: Annotated[bool | None, ignored("nothing is stored")] = None
    service_tier: Annotated[str | None, ACCOUNT] = None
    safety_identifier: Annotated[str | None, ACCOUNT] = None
    prompt_cache_key: Annotated[str | None, CACHE] = None
    prompt_cache_retention: Annotated[str | None, CACHE] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, CACHE] = None
    cache_control: Annotated[dict[str, Any] | None, CACHE] = None
    keep_alive: Annotated[int | float | str | None, ignored("the model stays loaded")] = None

    length_penalty: Annotated[float | None, refused(_NO_BEAMS, 1.0)] = None
    use_beam_search: Annotated[bool | None, refused(_NO_BEAMS)] = None
    early_stopping: Annotated[bool | None, refused(_NO_BEAMS)] = None
    prompt_logprobs: Annotated[
        int | None, refused("/v1/completions gives them with echo and logprobs")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None, ignored("it concerns slow tokenizers")
    ] = None
    return_token_ids: Annotated[bool | None, refused("/generate gives them as output_ids")] = None
    bad_words: Annotated[list[str] | None, refused("give the tokens to logit_bias")] = None
    truncate_prompt_tokens: Annotated[
        int | None, refused("a prompt that is too long is an error; shorten it before you send it")
    ] = None


def check_best_of(body: SamplingBody, n: int) -> None:
    """Raises InvalidParameter if more samples were to be drawn than are returned."""
    if body.best_of is not None and body.best_of != n:
        raise InvalidParameter("best_of", f"best_of is only supported equal to n ({n})")
