"""Bodies of OpenAI's endpoints, as far as we know them.

Every field may be null, which means its default. Fields that OpenAI defines and that do not change
what a text model answers are typed and then ignored; any other unknown field is refused, because a
misspelt parameter that does nothing is worse than an error.
"""

from __future__ import annotations

from typing import Any, Literal

from rootlace.runtime.gateway.http.constraint_types import (
    Body,
    ConstraintBody,
    ResponseFormat,
    StructuredOutputs,
)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(ConstraintBody):
    """What completions and chat completions share, but for what `with_sampling` adds."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # constraints in vLLM's names; sglang's and ours are the base's
    guided_regex: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structured_outputs: StructuredOutputs | None = None

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


class CompletionBody(SamplingBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ContentPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body, kw_only=True):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall
    index: int | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # what a reply of ours (or OpenAI's) carries when a client sends it back as history
    refusal: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChatBody(SamplingBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    # refused unless they ask for nothing
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None

    # accepted and ignored
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
