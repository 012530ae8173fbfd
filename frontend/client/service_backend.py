"""Common parts of backends for services that know conversations."""

from __future__ import annotations

import base64
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from rootlace.client.channel import Ask, BranchText, Channel, LocalChannel
from rootlace.client.endpoint import RuntimeEndpoint
from rootlace.language.sampling import JSON_TYPES, NUMBER_STOPS
from rootlace.wire import protocol
from rootlace.wire.errors import (
    ConstraintNotMet,
    DeadlineExceeded,
    InvalidConstraint,
    InvalidRequest,
    Overloaded,
    RootlaceError,
    ServerUnavailable,
    Unauthorized,
)
from rootlace.wire.sampling import PARAMETERS

# Chat request -------------------------------------------------------------------------------------
#
# A program's request to a service that knows conversations, and the service's reply.


# Rootlace's own notation: branches hold conversations in it until a request is sent.
CHAT = protocol.ChatFormat(
    roles={
        role: protocol.RoleFormat(begin=f"<|{role}|>", end="<|end|>")
        for role in ("system", "user", "assistant")
    }
)
_MARK = re.compile(r"<\|(system|user|assistant|end)\|>")


@dataclass
class Message:
    role: str
    content: list[str | protocol.Image] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.content if isinstance(piece, str))


@dataclass(frozen=True)
class ChatRequest:
    """Request of a `Generate`. Without `messages`, the service continues the text `prompt`; with
    `begun`, the last message, which is the assistant's. The answer must fit `schema`."""

    params: protocol.SamplingParams
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    begun: bool = False
    schema: Mapping[str, Any] | None = None
    stream: bool = False
    timeout: float = 600.0

    def told(self, hint: str) -> ChatRequest:
        """Return the request with `hint` at the end of the last user message."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "user":
            return replace(self, messages=(*self.messages, Message("user", [hint])))
        longer = Message("user", [*last.content, f"\n\n{hint}"])
        return replace(self, messages=(*self.messages[:-1], longer))


@dataclass
class Sample:
    """Answer, as far as it has come."""

    text: str = ""
    finish: protocol.FinishReason = "stop"
    came: bool = False


@dataclass
class Reply:
    """Answers, and the tokens they took."""

    samples: list[Sample]
    usage: protocol.Usage = field(default_factory=protocol.Usage)


Tell = Callable[[int, str], None]
"""Gets new text of a sample, by the sample's number, while it streams."""


@dataclass(frozen=True)
class Abilities:
    """Abilities of a service. `options` maps our names of sampling parameters to the service's;
    `samples`: several answers in one request."""

    options: Mapping[str, str]
    completions: bool = False
    continues: bool = False
    samples: bool = True
    advice: str = ""
    """Reason why the service cannot continue a message that has begun."""


def options_of(params: protocol.SamplingParams, abilities: Abilities) -> dict[str, Any]:
    """Return sampling parameters by the service's names, without those left at their default.
    Raises InvalidRequest for a parameter that the service does not have."""
    if params.logprobs or params.prompt_logprobs_from is not None:
        raise InvalidRequest("log-probabilities cannot be asked for here")
    options: dict[str, Any] = {}
    for name, about in PARAMETERS.items():
        value = getattr(params, name)
        if name in ("n", "max_tokens", "logprobs", "top_logprobs"):
            continue
        if value == about.default and not {name} & abilities.options.keys() & {*params.given}:
            continue
        if name not in abilities.options:
            if about.type is int and about.tuned and value <= 0:  # off, as where there is none
                continue
            raise InvalidRequest(f"{name} cannot be asked for here")
        options[abilities.options[name]] = list(value) if isinstance(value, tuple) else value
    return options


def read_branch(parts: Sequence[protocol.Part]) -> tuple[list[Message], str]:
    """Return the messages in a branch, and the role of the last one if it is still open."""
    messages: list[Message] = []
    opened = outside = ""
    for part in parts:
        if isinstance(part, protocol.Image):
            if not opened:
                raise InvalidRequest("an image stands in a message")
            messages[-1].content.append(part)
            continue
        if not isinstance(part, protocol.Text):
            raise InvalidRequest("token ids mean nothing to this server")
        pieces = _MARK.split(part.text) if part.special else [part.text]
        for index, piece in enumerate(pieces):
            if index % 2:
                opened = "" if piece == "end" else piece
                if opened:
                    messages.append(Message(opened))
            elif opened:
                messages[-1].content += [piece] if piece else []
            else:
                outside += piece
    if messages and outside.strip():
        raise InvalidRequest(f"text outside of messages cannot be sent: {outside!r}")
    return messages, opened


def written(
    messages: Sequence[Message], of_image: Callable[[protocol.Image], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Write messages for services: content is a text, or with images a list of parts."""

    def content(message: Message) -> str | list[dict[str, Any]]:
        if all(isinstance(piece, str) for piece in message.content):
            return message.text
        return [
            {"type": "text", "text": piece} if isinstance(piece, str) else of_image(piece)
            for piece in message.content
        ]

    return [{"role": each.role, "content": content(each)} for each in messages]


def openai_image(image: protocol.Image) -> dict[str, Any]:
    """Write an image as its address, or as an address that holds the data."""
    url = image.url or f"data:{image.media_type};base64,{encoded(image)}"
    return {"type": "image_url", "image_url": {"url": url}}


def encoded(image: protocol.Image) -> str:
    return base64.b64encode(image.data).decode()


def schema_of(constraint: protocol.Constraint) -> dict[str, Any]:
    """Return a constraint's JSON schema. Raises InvalidRequest for a constraint without one."""
    if constraint.kind == "regex" and constraint.source in JSON_TYPES:
        return {"type": JSON_TYPES[constraint.source]}
    if constraint.kind != "json_schema":
        raise InvalidRequest(
            f"a constraint of the kind {constraint.kind} cannot be asked for here, only "
            'json_schema (tools= is none; emulate=["regex"] asks for a pattern in words)'
        )
    schema = json.loads(constraint.source)
    return schema if isinstance(schema, dict) else {}


def response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Write a schema for the answer in OpenAI's form."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


# Http service -------------------------------------------------------------------------------------
#
# A service behind an HTTP address: JSON out, JSON or server-sent events in.


_KINDS: dict[int, type[RootlaceError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: InvalidRequest,
    413: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
    529: Overloaded,
}
# Exceptions of reading a reply of another form, or one that was cut off.
_BROKEN = (
    *(OSError, http.client.HTTPException),
    *(ValueError, LookupError, TypeError, AttributeError),
)


class HttpService:
    """HTTP client of `url`; raises typed errors for every fault."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **headers}

    def get(self, path: str, timeout: float) -> Any:
        with self._reading(timeout), self._open(path, None, timeout) as response:
            return json.load(response)

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        timeout: float,
        take: Callable[[dict[str, Any]], object],
    ) -> None:
        """Call `take` with the reply or, where the body says "stream", with each event."""
        with self._reading(timeout), self._open(path, body, timeout) as response:
            for event in _events(response) if body.get("stream") else [json.load(response)]:
                take(event)

    @contextmanager
    def _reading(self, timeout: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise self._too_late(timeout) from None
        except _BROKEN as error:
            raise ServerUnavailable(f"{self.url} answered something else: {error!r}") from error

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, dict(self._headers))
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            kind = _KINDS.get(error.code, ServerUnavailable)
            raise kind(f"{self.url} answered {error.code}: {_reason(error)}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise self._too_late(timeout) from None
            raise ServerUnavailable(f"{self.url} does not answer: {error}") from None

    def _too_late(self, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.url} has not answered within {timeout:g} s")


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Give the server-sent events of a stream."""
    for line in response:
        if line.startswith(b"data:") and line[5:].strip() not in (b"", b"[DONE]"):
            event: dict[str, Any] = json.loads(line[5:])
            if "error" in event:
                raise ServerUnavailable(str(event["error"]))
            yield event


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        body = json.load(error)
        return str(body.get("error", body).get("message", body))
    except (OSError, ValueError, AttributeError):
        return str(error.reason)


# Service backend ----------------------------------------------------------------------------------


EMULATED = ("select", "regex")
ATTEMPTS = 3
"""Most attempts to get an answer of the wanted form."""

AnswerEvent = protocol.Generated | protocol.Selected


class ServiceBackend(RuntimeEndpoint):
    """Backend that runs programs on a service, each request in its own thread, at most
    `concurrency` at a time.

    A request that the service does not support fails at its line of the program, with the reason.
    `emulate` names requests to approximate instead: "select" (the model is asked to write one of
    the choices; there are no scores) and "regex" (the model is told the pattern). Both ask up to
    three times until the answer fits.
    """

    _abilities: Abilities

    def __init__(
        self, url: str, model: str, emulate: Collection[str], concurrency: int, timeout: float
    ) -> None:
        for name in emulate:
            if isinstance(emulate, str) or name not in EMULATED:
                raise InvalidRequest(f"emulate= takes a list of {', '.join(EMULATED)}")
        self._address = url
        self._emulate = frozenset(emulate)
        self._timeout = timeout
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix=f"rootlace {url}")
        self._answers: dict[int, Future[AnswerEvent]] = {}
        info = protocol.ModelInfo(model, url, 1 << 31, 0, 1 << 31, 1, CHAT, images=True)
        self._closed = False
        self._channel = LocalChannel(info, self._answer, check=_check)

    def _reply(self, request: ChatRequest, tell: Tell) -> Reply:
        """Ask the service, in a thread. Raises typed errors."""
        raise NotImplementedError

    def connect(self) -> Channel:
        return self._channel

    def close(self) -> None:
        """End the threads after their replies. Later requests fail with ServerUnavailable."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, {self._channel.model.name!r})"

    # ------------------------------------------------------------ asking

    def _answer(self, branch: BranchText, op: Ask) -> list[protocol.Event] | None:
        answer = self._answers.get(op.op)
        if answer is None:
            work = self._work(branch, op)
            try:
                answer = self._pool.submit(work)
            except RuntimeError:
                if not self._closed:
                    raise
                raise self._gone() from None
            self._answers[op.op] = answer

            def done(_: object) -> None:
                if branch.broken:
                    self._answers.pop(op.op, None)
                self._channel.wake()

            answer.add_done_callback(done)
            return None
        if not answer.done():
            return None
        try:
            return [self._answers.pop(op.op).result()]
        except CancelledError:  # closed before a thread took the work
            raise self._gone() from None

    def _gone(self) -> ServerUnavailable:
        return ServerUnavailable(f"the backend of {self.url} was closed")

    def _work(self, branch: BranchText, op: Ask) -> Callable[[], AnswerEvent]:
        """Return a thread's work. Raises InvalidRequest for requests the service does not have."""
        if isinstance(op, protocol.Select):
            if "select" not in self._emulate:
                raise InvalidRequest(
                    "select() compares log-probabilities of given answers, which cannot be asked "
                    'for here; gen(type=...) or emulate=["select"] lets the model write one of them'
                )
            request = self._request(branch, op.handling.timeout, protocol.SamplingParams())
            return lambda: self._select(request, op)
        constraint, params = op.constraint, op.params
        pattern = schema = None
        if constraint is not None and constraint.kind in self._emulate:
            try:
                pattern = re.compile(constraint.source)
            except re.error as error:
                raise InvalidConstraint(f"regex: {error}") from None
        elif constraint is not None:
            schema = schema_of(constraint)
        if constraint is not None and constraint.source in JSON_TYPES:
            # White space ends Rootlace's numbers, and may precede a service's.
            stop = tuple(text for text in params.stop if text not in NUMBER_STOPS)
            params = msgspec.structs.replace(params, stop=stop)
        request = self._request(branch, op.handling.timeout, params)
        if pattern is not None:
            return lambda: self._matching(request, op, pattern)
        if schema is not None and not request.messages:
            raise InvalidRequest("a constraint can be asked for in an assistant's message only")
        sent = replace(request, schema=schema, stream=op.stream)
        return lambda: self._generate(sent, op)

    def _request(
        self, branch: BranchText, timeout: float | None, params: protocol.SamplingParams
    ) -> ChatRequest:
        abilities = self._abilities
        options_of(params, abilities)
        messages, opened = read_branch(branch.parts)
        request = ChatRequest(params, timeout=timeout or self._timeout)
        if not messages and not opened:
            if not abilities.completions:
                raise InvalidRequest(
                    "text without messages cannot be sent; write rl.user(...) and "
                    "rl.assistant(rl.gen(...))"
                )
            return replace(request, prompt=branch.text)
        if opened != "assistant":
            raise InvalidRequest("where there are messages, a gen stands in an assistant's message")
        begun = bool(messages[-1].content)
        if begun and not abilities.continues:
            raise InvalidRequest(f"the assistant's message has begun, and {abilities.advice}")
        return replace(request, messages=tuple(messages if begun else messages[:-1]), begun=begun)

    # ------------------------------------------------------------ in a thread

    def _generate(self, request: ChatRequest, op: protocol.Generate) -> protocol.Generated:
        began = time.perf_counter()
        first: list[float] = []

        def tell(index: int, text: str) -> None:
            if not first:
                first.append(time.perf_counter() - began)
            if op.stream and text:
                self._channel.tell(protocol.Chunk(op.op, index, text))

        if self._abilities.samples:
            reply = self._reply(request, tell)
        else:
            reply = _joined(
                [
                    self._reply(request, lambda _, text, at=at: tell(at, text))  # type: ignore[misc]
                    for at in range(op.params.n)
                ]
            )
        came = sum(sample.came for sample in reply.samples)
        if came < op.params.n:
            raise ServerUnavailable(f"{self.url} gave {came} samples of {op.params.n}")
        outputs = tuple(protocol.Output(each.text, (), each.finish) for each in reply.samples)
        # A whole reply does not tell when its first token came.
        timing = _timing(began, first[0] if op.stream and first else None)
        return protocol.Generated(op.op, outputs, reply.usage, timing)

    def _asking(self, request: ChatRequest, hint: str) -> tuple[str, protocol.Usage]:
        if not request.messages or request.begun:
            raise InvalidRequest("what is emulated is asked for at the begin of an answer")
        one = replace(request.told(hint), params=msgspec.structs.replace(request.params, n=1))
        reply = self._reply(one, _ignore)
        return reply.samples[0].text.strip(), reply.usage

    def _select(self, request: ChatRequest, op: protocol.Select) -> protocol.Selected:
        listed = "\n".join(op.choices)
        hint = f"Answer with one of these lines, exactly as it is, and with nothing else:\n{listed}"
        backwards = [*enumerate(op.choices)][::-1]  # of equal choices, the first
        exact = {choice.strip(): index for index, choice in backwards}
        plain = {_plain(choice): index for index, choice in backwards}
        began = time.perf_counter()
        usage = protocol.Usage()
        for _ in range(ATTEMPTS):
            answer, used = self._asking(request, hint)
            usage = _sum([usage, used])
            index = exact.get(answer, plain.get(_plain(answer)))
            if index is not None:
                choice, timing = op.choices[index], _timing(began)
                return protocol.Selected(op.op, choice, index, (), usage, (), timing)
        raise ConstraintNotMet(f"the answer {answer!r} is none of {list(op.choices)}")

    def _matching(
        self, request: ChatRequest, op: protocol.Generate, pattern: re.Pattern[str]
    ) -> protocol.Generated:
        hint = (
            "Answer with a text that matches this regular expression as a whole, and with nothing "
            f"else: {pattern.pattern}"
        )
        began = time.perf_counter()
        samples: list[Sample] = []
        used: list[protocol.Usage] = []
        for _ in range(ATTEMPTS * op.params.n):
            answer, usage = self._asking(request, hint)
            used.append(usage)
            for stop in {*op.params.stop} & {*NUMBER_STOPS}:
                answer = answer.partition(stop)[0]
            if pattern.fullmatch(answer):
                samples.append(Sample(answer, came=True))
            if len(samples) == op.params.n:
                break
        else:
            raise ConstraintNotMet(f"the answer {answer!r} does not match {pattern.pattern!r}")
        outputs = tuple(protocol.Output(each.text, (), "stop") for each in samples)
        if op.stream:
            for index, output in enumerate(outputs):
                self._channel.tell(protocol.Chunk(op.op, index, output.text))
        return protocol.Generated(op.op, outputs, _sum(used), _timing(began))


def _timing(began: float, first: float | None = None) -> protocol.Timing:
    total = time.perf_counter() - began
    return protocol.Timing(0.0, total if first is None else first, total, clock="client")


def _ignore(index: int, text: str) -> None:
    pass


def _plain(text: str) -> str:
    """Normalise a choice that may be written with some freedom."""
    return text.strip().strip("\"'`*.").casefold()


def _joined(replies: Sequence[Reply]) -> Reply:
    samples = [sample for reply in replies for sample in reply.samples]
    return Reply(samples, _sum([reply.usage for reply in replies]))


def _sum(usages: Sequence[protocol.Usage]) -> protocol.Usage:
    return protocol.Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
    )


def _check(op: protocol.Op) -> None:
    """Raise InvalidRequest for options that no service has."""
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
