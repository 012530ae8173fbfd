"""Bodies of sglang's native endpoints, in its names and with its defaults."""

from __future__ import annotations

from typing import Any

from rootlace.runtime.gateway.http.constraint_types import Body, ConstraintBody


class SamplingParamsBody(ConstraintBody):
    """`sampling_params` of `/generate`, but for what `with_sampling` adds.

    Null means the default; for `max_new_tokens`, no limit.
    """

    max_new_tokens: int | None = 128

    # accepted and ignored: the first concerns only slow tokenizers (sglang's frontend sends it)
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None

    # refused unless null
    stop_regex: Any = None
    custom_params: Any = None


class GenerateBody(Body):
    """`POST /generate`. Of a batch, every field may be a list with one entry per prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None

    model: str | None = None

    # accepted and ignored: they do not change the answer
    log_metrics: bool | None = None
    no_logs: bool | None = None
    background: bool | None = None
    priority: int | None = None
    return_bytes: bool | None = None

    # refused unless they ask for nothing
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    custom_logit_processor: Any = None
    modalities: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
