"""Backends for other services: OpenAI's interface, Anthropic's, and LiteLLM's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rootlace.client.service_backend import (
    Abilities,
    ChatRequest,
    HttpService,
    Reply,
    Sample,
    ServiceBackend,
    Tell,
    encoded,
    openai_image,
    options_of,
    response_format,
    written,
)
from rootlace.wire import protocol
from rootlace.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RootlaceError,
    ServerUnavailable,
    Unauthorized,
)
from rootlace.wire.sampling import names_in

# OpenAI -------------------------------------------------------------------------------------------


class OpenAIBackend(ServiceBackend):
    """Backend for a server with OpenAI's interface: `OpenAIBackend(url, "name")`, where `url` ends
    with `/v1`. Without a model's name, the server's first model.

    Messages go to `/chat/completions`, text without messages to `/completions`. These fail at their
    line, with the reason: `select`, `regex` and grammars, token ids, tools, adapters, and `cache`
    options (a pin to "try" is left out). So does a `gen` behind other text in an assistant's
    message, unless the server continues such messages (`continues=True`: vLLM's and Rootlace's
    `continue_final_message`). `json_schema` and `type=` become a chat's `response_format`;
    `emulate=["select", "regex"]` has the model asked in words (`ServiceBackend`). The cache is
    known only by the server's own figures. At most `concurrency` requests run at a time, each for
    at most `timeout` seconds; a cancelled request runs to its end there.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        *,
        continues: bool = False,
        emulate: Collection[str] = (),
        concurrency: int = 64,
        timeout: float = 600.0,
    ) -> None:
        http = HttpService(url, {"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._http = http
        self._model = model or _first_model(http, timeout)
        self._abilities = Abilities(
            # Servers of open models take more than OpenAI's own, which refuses the rest itself.
            names_in("openai"),
            completions=True,
            continues=continues,
            advice="this server cannot go on with one; if it can, say so: "
            "OpenAIBackend(continues=True)",
        )
        super().__init__(http.url, self._model, emulate, concurrency, timeout)

    def _reply(self, request: ChatRequest, tell: Tell) -> Reply:
        body = {"model": self._model, **openai_body(request, self._abilities)}
        path = "/completions"
        if request.messages:
            path, body["messages"] = "/chat/completions", written(request.messages, openai_image)
            if request.begun:
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            body["prompt"] = request.prompt
        reply = Reply([Sample() for _ in range(request.params.n)])
        self._http.post(path, body, request.timeout, lambda event: take_openai(event, reply, tell))
        return reply


def _first_model(http: HttpService, timeout: float) -> str:
    listed = http.get("/models", timeout).get("data") or []
    if not listed:
        raise ServerUnavailable(f"{http.url} serves no model")
    return str(listed[0]["id"])


def openai_body(request: ChatRequest, abilities: Abilities) -> dict[str, Any]:
    """Return the body of a request to OpenAI's interface, without model, prompt and messages."""
    body: dict[str, Any] = {**options_of(request.params, abilities), "stream": request.stream}
    if request.params.n > 1:
        body["n"] = request.params.n
    if request.params.max_tokens is not None:
        body["max_tokens"] = request.params.max_tokens
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    if request.schema is not None:
        body["response_format"] = response_format(request.schema)
    return body


def take_openai(event: Mapping[str, Any], reply: Reply, tell: Tell) -> None:
    """Add the contents of a reply of OpenAI's form, or of an event of its stream."""
    usage = event.get("usage")
    if usage:
        details = usage.get("prompt_tokens_details") or {}
        reply.usage = protocol.Usage(
            prompt_tokens=usage.get("prompt_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
        )
    for choice in event.get("choices", ()):
        sample = reply.samples[choice.get("index", 0)]
        message = choice.get("delta") or choice.get("message") or choice
        text = str(message.get("content") or message.get("text") or "")
        sample.text += text
        # The connection of a stream that was cut off ends like that of a whole one.
        sample.came |= "message" in choice or bool(choice.get("finish_reason"))
        if choice.get("finish_reason"):
            sample.finish = "length" if choice["finish_reason"] == "length" else "stop"
        tell(choice.get("index", 0), text)


# Anthropic ----------------------------------------------------------------------------------------


_VERSION = "2023-06-01"
_MOST = 4096  # Anthropic requires `max_tokens`


class AnthropicBackend(ServiceBackend):
    """Backend for Anthropic's interface: `AnthropicBackend("name", api_key=...)`; `url` is another
    server with that interface.

    All text stands in messages. `json_schema` and `type=` become `output_config`, and a `gen` with
    `n` is asked `n` times, one after the other. A `gen` behind other text in an assistant's message
    continues that message, which newer models of Anthropic's refuse. These fail at their line, with
    the reason: those that `OpenAIBackend` lists, and sampling options other than `max_tokens`,
    `temperature`, `top_p`, `top_k` and `stop`.
    """

    _abilities = Abilities(names_in("anthropic"), continues=True, samples=False)

    def __init__(
        self,
        model: str,
        api_key: str | None = None,
        *,
        url: str = "https://api.anthropic.com",
        emulate: Collection[str] = (),
        concurrency: int = 16,
        timeout: float = 600.0,
    ) -> None:
        self._http = HttpService(url, {"x-api-key": api_key or "", "anthropic-version": _VERSION})
        self._model = model
        super().__init__(self._http.url, model, emulate, concurrency, timeout)

    def _reply(self, request: ChatRequest, tell: Tell) -> Reply:
        messages = [each for each in request.messages if each.role != "system"]
        system = "\n\n".join(each.text for each in request.messages if each.role == "system")
        options = options_of(request.params, self._abilities)
        if options.get("top_k", 1) <= 0:
            del options["top_k"]  # Anthropic turns top-k off by its absence alone
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.params.max_tokens or _MOST,
            "messages": written(messages, _block),
            **options,
            "stream": request.stream,
        }
        if system:
            body["system"] = system
        if request.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": request.schema}}
        reply = Reply([Sample()])
        http, path = self._http, "/v1/messages"
        http.post(path, body, request.timeout, lambda event: _take(event, reply, tell))
        return reply


def _block(image: protocol.Image) -> dict[str, Any]:
    source = {"type": "base64", "media_type": image.media_type, "data": encoded(image)}
    return {"type": "image", "source": {"type": "url", "url": image.url} if image.url else source}


def _take(event: Mapping[str, Any], reply: Reply, tell: Tell) -> None:
    """Add the contents of a message, or of an event of its stream."""
    kind = event["type"]
    (sample,) = reply.samples
    source = event["message"] if kind == "message_start" else event
    if kind in ("message", "message_start", "message_delta"):
        reply.usage = _usage(source.get("usage") or {}, reply.usage)
    texts: list[str] = []
    if kind == "message":
        texts = [block["text"] for block in event["content"] if block["type"] == "text"]
    elif kind == "content_block_delta" and event["delta"]["type"] == "text_delta":
        texts = [event["delta"]["text"]]
    for text in texts:
        sample.text += text
        tell(0, text)
    reason = (event.get("delta") or event).get("stop_reason")
    if reason:
        sample.came = True
        sample.finish = "length" if reason == "max_tokens" else "stop"


def _usage(usage: Mapping[str, Any], before: protocol.Usage) -> protocol.Usage:
    """Update counts, some of which later events repeat. Input tokens there exclude cached ones."""
    cached = usage.get("cache_read_input_tokens")
    if usage.get("input_tokens") is None:
        prompt, cached = before.prompt_tokens, before.cached_tokens
    else:
        cached = cached or 0
        written = usage.get("cache_creation_input_tokens") or 0
        prompt = usage["input_tokens"] + cached + written
    return protocol.Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=usage.get("output_tokens") or before.completion_tokens,
    )


# LiteLLM ------------------------------------------------------------------------------------------


_OPTIONS = {
    name: name
    for name in (
        "temperature", "top_p", "stop", "seed", "frequency_penalty", "presence_penalty",
        "logit_bias",
    )
}  # fmt: skip
# Its exceptions by their names; the first that fits. Importing it takes seconds.
_ERRORS: tuple[tuple[str, type[RootlaceError]], ...] = (
    ("Timeout", DeadlineExceeded),
    ("AuthenticationError", Unauthorized),
    ("PermissionDeniedError", Unauthorized),
    ("RateLimitError", Overloaded),
    ("BadRequestError", InvalidRequest),
    ("NotFoundError", InvalidRequest),
    ("UnprocessableEntityError", InvalidRequest),
)


class LiteLLMBackend(ServiceBackend):
    """Backend that calls `litellm.completion` (`pip install rootlace[litellm]`):
    `LiteLLMBackend("gemini/name")`. `options` are passed on with each request (`api_base`,
    `api_key`, ...).

    All text stands in messages. `json_schema` and `type=` become `response_format`. These fail at
    their line, with the reason: those that `OpenAIBackend` lists, a `gen` behind other text in an
    assistant's message, and sampling options that OpenAI's own interface lacks.
    """

    _abilities = Abilities(_OPTIONS, advice="LiteLLM has no way to go on with one")

    def __init__(
        self,
        model: str,
        *,
        emulate: Collection[str] = (),
        concurrency: int = 16,
        timeout: float = 600.0,
        **options: Any,
    ) -> None:
        try:
            import litellm
        except ImportError:
            raise InvalidRequest(
                "LiteLLMBackend needs the package litellm: pip install rootlace[litellm]"
            ) from None
        self._complete = litellm.completion
        self._options = {"model": model, **options}
        super().__init__("litellm", model, emulate, concurrency, timeout)

    def _reply(self, request: ChatRequest, tell: Tell) -> Reply:
        options = {
            **self._options,
            **openai_body(request, self._abilities),
            "messages": written(request.messages, openai_image),
            "timeout": request.timeout,
        }
        reply = Reply([Sample() for _ in range(request.params.n)])
        try:
            answer = self._complete(**options)
            for event in answer if request.stream else (answer,):
                take_openai(event.model_dump(), reply, tell)
        except Exception as error:
            raise _typed(error) from error
        return reply


def _typed(error: Exception) -> RootlaceError:
    names = {kind.__name__ for kind in type(error).__mro__}
    kind = next((kind for name, kind in _ERRORS if name in names), ServerUnavailable)
    return kind(f"litellm: {type(error).__name__}: {error}")
