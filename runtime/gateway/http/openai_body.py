"""What the bodies of OpenAI's endpoints have in common.

Every field may be null, which means its default. Fields that OpenAI defines and that do not change
what a text model answers are typed and then ignored; any other unknown field is refused, because a
misspelt parameter that does nothing is worse than an error.
"""

from __future__ import annotations

from typing import Any

from rootlace.runtime.gateway.http.body import Body
from rootlace.runtime.gateway.http.constraints import OpenAIConstraintBody


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(OpenAIConstraintBody):
    """What completions and chat completions share, but for what `with_sampling` adds."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    cache_salt: str | None = None

    # accepted and ignored
    guided_decoding_backend: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
