"""Programs on any server with OpenAI's interface: as far as that goes."""

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
    openai_messages,
    options_of,
    response_format,
)
from rootlace.wire import protocol
from rootlace.wire.errors import ServerUnavailable
from rootlace.wire.sampling import names_in


class OpenAIBackend(ServiceBackend):
    """Runs programs on a server with OpenAI's interface: `OpenAIBackend(url, "name")`, where `url`
    ends with `/v1`. Without a model's name, it is the first that the server lists.

    Messages go to `/chat/completions`, and text without any to `/completions`. What cannot be asked
    for there fails at its line, with the reason: `select`, `regex` and grammars, token ids, tools,
    adapters, and what `cache` may say (a pin that is only to be tried is left out); so does a `gen`
    behind other text in an assistant's message, unless the server goes on with a message that has
    begun (`continues=True`: vLLM's and Rootlace's `continue_final_message`). `json_schema` and
    `type=` are asked for in a chat, as `response_format`; `emulate=["select", "regex"]` has the
    model asked in words (`ServiceBackend`). Nothing is known of the cache beyond what the server
    says. At most `concurrency` requests run at a time, each for `timeout` seconds at most; one that
    is cancelled runs to its end there.
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
        name = model or _first_model(http, timeout)
        super().__init__(
            _OpenAI(http, name, continues),
            http.url,
            name,
            emulate=emulate,
            concurrency=concurrency,
            timeout=timeout,
        )


def _first_model(http: HttpService, timeout: float) -> str:
    listed = http.get("/models", timeout).get("data") or []
    if not listed:
        raise ServerUnavailable(f"{http.url} serves no model")
    return str(listed[0]["id"])


class _OpenAI:
    """The service."""

    def __init__(self, http: HttpService, model: str, continues: bool) -> None:
        self.abilities = Abilities(
            # Servers of open models take more than OpenAI's own, which refuses the rest itself.
            names_in("openai"),
            completions=True,
            continues=continues,
            advice="this server cannot go on with one; if it can, say so: "
            "OpenAIBackend(continues=True)",
        )
        self._http = http
        self._model = model

    def generate(self, request: ChatRequest, tell: Tell) -> Reply:
        body = {"model": self._model, **openai_body(request, self.abilities)}
        path = "/completions"
        if request.messages:
            path, body["messages"] = "/chat/completions", openai_messages(request.messages)
            if request.begun:
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            body["prompt"] = request.prompt
        reply = Reply([Sample() for _ in range(request.params.n)])
        self._http.post(path, body, request.timeout, lambda said: take_openai(said, reply, tell))
        return reply


def openai_body(request: ChatRequest, abilities: Abilities) -> dict[str, Any]:
    """What OpenAI's interface is asked, but for the model and the prompt or messages."""
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
    """Add what a reply of OpenAI's form, or an event of its stream, says."""
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
