"""Programs on any server with OpenAI's interface: as far as that goes."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rootlace.client.channel import Channel
from rootlace.client.endpoint import RuntimeEndpoint
from rootlace.client.local_channel import LocalChannel
from rootlace.client.machine import Ask, BranchText
from rootlace.wire import protocol
from rootlace.wire.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RootlaceError,
    ServerUnavailable,
    Unauthorized,
)
from rootlace.wire.sampling import PARAMETERS

CHAT = protocol.ChatFormat(
    roles={
        role: protocol.RoleFormat(begin=f"<|{role}|>", end="<|end|>")
        for role in ("system", "user", "assistant")
    },
)
_MARK = re.compile(r"<\|(system|user|assistant|end)\|>")
_STATUS: dict[int, type[RootlaceError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
}


@dataclass
class _Sample:
    """One sample, as far as it has come."""

    text: str = ""
    finish: str = "stop"
    came: bool = False


class OpenAIBackend(RuntimeEndpoint):
    """Runs programs on a server with OpenAI's interface: `OpenAIBackend(url, "name")`, where `url`
    ends with `/v1`. Without a model's name, it is the first that the server lists.

    Messages go to `/chat/completions`, and text without any to `/completions`. What cannot be asked
    for there fails at its line, with the reason: `select`, `regex` and grammars, token ids, tools,
    adapters, and what `cache` may say (a pin that is only to be tried is left out); so does a `gen`
    behind other text in an assistant's message, unless the server goes on with a message that has
    begun (`continues=True`: vLLM's and Rootlace's `continue_final_message`). `json_schema` and
    `type=` are asked for in a chat, as `response_format`. Nothing is known of the cache beyond what
    the server says. At most `concurrency` requests run at a time, each for `timeout` seconds at
    most; one that is cancelled runs to its end there.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        *,
        continues: bool = False,
        concurrency: int = 64,
        timeout: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._key = api_key or ""
        self._continues = continues
        self._timeout = timeout
        self._name = model or self._first_model()
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix=f"rootlace {url}")
        self._asked: dict[int, Future[protocol.Generated]] = {}
        info = protocol.ModelInfo(self._name, self.url, 1 << 31, 0, 1 << 31, 1, CHAT)
        self._closed = False
        self._channel = LocalChannel(info, self._answer, check=_check)

    def connect(self) -> Channel:
        return self._channel

    def close(self) -> None:
        """End the threads once what they ask for is there. What is asked later fails with
        ServerUnavailable."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _first_model(self) -> str:
        with self._open("/models", None, self._timeout) as response:
            listed = json.load(response).get("data") or []
        if not listed:
            raise ServerUnavailable(f"{self.url} serves no model")
        return str(listed[0]["id"])

    # ------------------------------------------------------------ asking

    def _answer(self, branch: BranchText, op: Ask) -> list[protocol.Event] | None:
        asked = self._asked.get(op.op)
        if asked is None:
            if isinstance(op, protocol.Select):
                raise InvalidRequest(
                    "select() compares log-probabilities of given answers, which cannot be asked "
                    "for here; gen(type=...) lets the model write one of them"
                )
            path, body = self._request(branch, op)
            try:
                asked = self._pool.submit(self._generate, path, body, op)
            except RuntimeError:
                if not self._closed:
                    raise
                raise self._gone() from None
            self._asked[op.op] = asked

            def done(_: object) -> None:
                if branch.broken:
                    self._asked.pop(op.op, None)
                self._channel.wake()

            asked.add_done_callback(done)
            return None
        if not asked.done():
            return None
        try:
            return [self._asked.pop(op.op).result()]
        except CancelledError:  # it was closed before a thread came to it
            raise self._gone() from None

    def _gone(self) -> ServerUnavailable:
        return ServerUnavailable(f"the backend of {self.url} was closed")

    def _request(self, branch: BranchText, op: protocol.Generate) -> tuple[str, dict[str, Any]]:
        """Path and body. Raises InvalidRequest for what cannot be asked for."""
        body: dict[str, Any] = {"model": self._name, **_options(op.params), "stream": op.stream}
        if op.stream:
            body["stream_options"] = {"include_usage": True}
        messages, opened = _messages(branch.parts)
        if not messages and not opened:
            if op.constraint is not None:
                raise InvalidRequest("a constraint can be asked for in an assistant's message only")
            return "/completions", {**body, "prompt": branch.text}
        if opened != "assistant":
            raise InvalidRequest("where there are messages, a gen stands in an assistant's message")
        if messages[-1]["content"]:
            if not self._continues:
                raise InvalidRequest(
                    "the assistant's message has begun, and this server cannot go on with one; "
                    "if it can, say so: OpenAIBackend(continues=True)"
                )
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            messages = messages[:-1]
        if op.constraint is not None:
            body["response_format"] = _response_format(op.constraint)
        return "/chat/completions", {**body, "messages": messages}

    def _generate(
        self, path: str, body: Mapping[str, Any], op: protocol.Generate
    ) -> protocol.Generated:
        samples = [_Sample() for _ in range(op.params.n)]
        usage: dict[str, Any] = {}
        timeout = op.handling.timeout or self._timeout
        try:
            with self._open(path, body, timeout) as response:
                for reply in _events(response) if op.stream else [json.load(response)]:
                    usage = reply.get("usage") or usage
                    for choice in reply.get("choices", ()):
                        self._take(choice, samples, op)
        except TimeoutError:
            raise self._too_late(timeout) from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerUnavailable(f"{self.url} answered something else: {error!r}") from error
        if not all(each.came for each in samples):
            came = sum(each.came for each in samples)
            raise ServerUnavailable(f"{self.url} gave {came} samples of {len(samples)}")
        outputs = [
            protocol.Output(each.text, (), "length" if each.finish == "length" else "stop")
            for each in samples
        ]
        details = usage.get("prompt_tokens_details") or {}
        return protocol.Generated(
            op.op,
            tuple(outputs),
            protocol.Usage(
                prompt_tokens=usage.get("prompt_tokens") or 0,
                cached_tokens=details.get("cached_tokens") or 0,
                completion_tokens=usage.get("completion_tokens") or 0,
            ),
        )

    def _take(
        self, choice: Mapping[str, Any], samples: list[_Sample], op: protocol.Generate
    ) -> None:
        index = choice.get("index", 0)
        text = _text(choice)
        samples[index].text += text
        samples[index].came = True
        samples[index].finish = choice.get("finish_reason") or samples[index].finish
        if op.stream and text:
            self._channel.tell(protocol.Chunk(op.op, index, text))

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data)
        request.add_header("Content-Type", "application/json")
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            kind = _STATUS.get(error.code, ServerUnavailable)
            raise kind(f"{self.url} answered {error.code}: {_reason(error)}") from None
        except (OSError, ValueError) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise self._too_late(timeout) from None
            raise ServerUnavailable(f"{self.url} does not answer: {error}") from None

    def _too_late(self, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.url} has not answered within {timeout:g} s")


def _check(op: protocol.Op) -> None:
    """Raise InvalidRequest for what is not text but cannot be asked for either."""
    if isinstance(op, protocol.Open):
        if op.adapter:
            raise InvalidRequest(
                "an adapter cannot be asked for here; where the server lists it as a model, name "
                "that: OpenAIBackend(url, model)"
            )
        if not op.share:
            raise InvalidRequest("Cache(share=False) cannot be asked for here")
    elif isinstance(op, protocol.Generate):
        cache = op.handling.cache
        if cache.pin is True or (cache.ttl is not None and not cache.pin):
            raise InvalidRequest("a pin or ttl in the cache cannot be asked for here")


def _options(params: protocol.SamplingParams) -> dict[str, Any]:
    """Sampling parameters by OpenAI's names; those that are as usual stay unsaid."""
    if params.logprobs or params.prompt_logprobs_from is not None:
        raise InvalidRequest("log-probabilities cannot be asked for here")
    options: dict[str, Any] = {}
    for name, about in PARAMETERS.items():
        value = getattr(params, name)
        fields = about.fields("openai")
        if fields and value != about.default:
            options[fields[0]] = list(value) if isinstance(value, tuple) else value
    if params.max_tokens is not None:
        options["max_tokens"] = params.max_tokens
    return options


def _response_format(constraint: protocol.Constraint) -> dict[str, Any]:
    if constraint.kind != "json_schema":
        raise InvalidRequest(
            f"a constraint of the kind {constraint.kind} cannot be asked for here, only json_schema"
        )
    schema = json.loads(constraint.source)
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def _messages(parts: list[protocol.Part]) -> tuple[list[dict[str, str]], str]:
    """The messages in a branch, and the role of the last one if it is still open."""
    found: list[dict[str, str]] = []
    opened = outside = ""
    for part in parts:
        if not isinstance(part, protocol.Text):
            raise InvalidRequest("token ids mean nothing to this server")
        pieces = _MARK.split(part.text) if part.special else [part.text]
        for index, piece in enumerate(pieces):
            if index % 2:
                opened = "" if piece == "end" else piece
                if opened:
                    found.append({"role": opened, "content": ""})
            elif opened:
                found[-1]["content"] += piece
            else:
                outside += piece
    if found and outside.strip():
        raise InvalidRequest(f"text outside of messages cannot be sent: {outside!r}")
    return found, opened


def _text(choice: Mapping[str, Any]) -> str:
    """What a choice holds, or what is new of it."""
    message = choice.get("delta") or choice.get("message") or choice
    return str(message.get("content") or message.get("text") or "")


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The server-sent events of a stream."""
    for line in response:
        if line.startswith(b"data:") and line[5:].strip() not in (b"", b"[DONE]"):
            event: dict[str, Any] = json.loads(line[5:])
            if "error" in event:
                raise ServerUnavailable(str(event["error"]))
            yield event


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        said = json.load(error)
        return str(said.get("error", said).get("message", said))
    except (OSError, ValueError, AttributeError):
        return str(error.reason)
