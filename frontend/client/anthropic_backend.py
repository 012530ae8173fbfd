"""Programs on Anthropic's models, or whatever speaks their interface."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rootlace.client.service_backend import (
    Abilities,
    ChatRequest,
    HttpService,
    Message,
    Reply,
    Sample,
    ServiceBackend,
    Tell,
    encoded,
    options_of,
)
from rootlace.wire import protocol
from rootlace.wire.sampling import names_in

_VERSION = "2023-06-01"
_MOST = 4096  # `max_tokens` must be said there


class AnthropicBackend(ServiceBackend):
    """Runs programs by Anthropic's interface: `AnthropicBackend("name", api_key=...)`; `url` is
    that of another server which speaks it.

    All text stands in messages. `json_schema` and `type=` are asked for as `output_config`, and a
    `gen` with `n` is asked `n` times, one after the other. A `gen` behind other text in an
    assistant's message goes on with that message, which newer models of Anthropic's refuse. What
    cannot be asked for fails at its line, with the reason: what `OpenAIBackend` says, and of the
    sampling options all but `max_tokens`, `temperature`, `top_p`, `top_k` and `stop`.
    """

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
        http = HttpService(url, {"x-api-key": api_key or "", "anthropic-version": _VERSION})
        super().__init__(
            _Anthropic(http, model),
            http.url,
            model,
            emulate=emulate,
            concurrency=concurrency,
            timeout=timeout,
        )


class _Anthropic:
    """The service."""

    abilities = Abilities(names_in("anthropic"), continues=True, samples=False)

    def __init__(self, http: HttpService, model: str) -> None:
        self._http = http
        self._model = model

    def generate(self, request: ChatRequest, tell: Tell) -> Reply:
        told = [each for each in request.messages if each.role != "system"]
        system = "\n\n".join(each.text for each in request.messages if each.role == "system")
        options = options_of(request.params, self.abilities)
        if options.get("top_k", 1) <= 0:
            del options["top_k"]  # only what is not said is off there
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.params.max_tokens or _MOST,
            "messages": [{"role": each.role, "content": _blocks(each)} for each in told],
            **options,
            "stream": request.stream,
        }
        if system:
            body["system"] = system
        if request.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": request.schema}}
        reply = Reply([Sample()])
        http, path = self._http, "/v1/messages"
        http.post(path, body, request.timeout, lambda said: _take(said, reply, tell))
        return reply


def _blocks(message: Message) -> str | list[dict[str, Any]]:
    if all(isinstance(piece, str) for piece in message.content):
        return message.text
    return [
        {"type": "text", "text": piece}
        if isinstance(piece, str)
        else {"type": "image", "source": _source(piece)}
        for piece in message.content
    ]


def _source(image: protocol.Image) -> dict[str, str]:
    if image.url:
        return {"type": "url", "url": image.url}
    return {"type": "base64", "media_type": image.media_type, "data": encoded(image)}


def _take(event: Mapping[str, Any], reply: Reply, tell: Tell) -> None:
    """Add what a message, or an event of its stream, says."""
    kind = event["type"]
    (sample,) = reply.samples
    told = event["message"] if kind == "message_start" else event
    if kind in ("message", "message_start", "message_delta"):
        reply.usage = _usage(told.get("usage") or {}, reply.usage)
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


def _usage(told: Mapping[str, Any], before: protocol.Usage) -> protocol.Usage:
    """Later events repeat some of the counts. What was cached is not counted as input there."""
    cached = told.get("cache_read_input_tokens")
    if told.get("input_tokens") is None:
        prompt, cached = before.prompt_tokens, before.cached_tokens
    else:
        cached = cached or 0
        written = told.get("cache_creation_input_tokens") or 0
        prompt = told["input_tokens"] + cached + written
    return protocol.Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=told.get("output_tokens") or before.completion_tokens,
    )
