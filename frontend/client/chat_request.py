"""What a program asks of a service that knows conversations, and what such a service gives."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.sampling import PARAMETERS

# A notation of our own, in which branches hold conversations until they are asked about.
CHAT = protocol.ChatFormat(
    roles={
        role: protocol.RoleFormat(begin=f"<|{role}|>", end="<|end|>")
        for role in ("system", "user", "assistant")
    },
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
    """A `Generate`. Without `messages`, it goes on with the text `prompt`; with `begun`, with the
    last of the messages, which is the assistant's. `schema`: what the answer must fit."""

    params: protocol.SamplingParams
    messages: tuple[Message, ...] = ()
    prompt: str = ""
    begun: bool = False
    schema: Mapping[str, Any] | None = None
    stream: bool = False
    timeout: float = 600.0

    def told(self, hint: str) -> ChatRequest:
        """The same request with `hint` behind what was asked."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "user":
            return replace(self, messages=(*self.messages, Message("user", [hint])))
        longer = Message("user", [*last.content, f"\n\n{hint}"])
        return replace(self, messages=(*self.messages[:-1], longer))


@dataclass
class Sample:
    """One answer, as far as it has come."""

    text: str = ""
    finish: protocol.FinishReason = "stop"
    came: bool = False


@dataclass
class Reply:
    """The answers, and how many tokens they took."""

    samples: list[Sample]
    usage: protocol.Usage = field(default_factory=protocol.Usage)


Tell = Callable[[int, str], None]
"""Gets new text of a sample, by its number, while it streams."""


@dataclass(frozen=True)
class Abilities:
    """What a service can be asked for. `options` are the sampling parameters, by our names and the
    service's; `samples`: several answers at once."""

    options: Mapping[str, str]
    completions: bool = False
    continues: bool = False
    samples: bool = True
    advice: str = ""
    """Why it does not go on with a message that has begun."""


class Service(Protocol):
    """A service, asked by one thread per request. Raises typed errors."""

    @property
    def abilities(self) -> Abilities: ...

    def generate(self, request: ChatRequest, tell: Tell) -> Reply: ...


def options_of(params: protocol.SamplingParams, abilities: Abilities) -> dict[str, Any]:
    """Sampling parameters by the service's names; those that are not named stay unsaid. Raises
    InvalidRequest for one that it does not have."""
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
            if name == "top_k" and value <= 0:  # off, as where there is none
                continue
            raise InvalidRequest(f"{name} cannot be asked for here")
        options[abilities.options[name]] = list(value) if isinstance(value, tuple) else value
    return options


def read_branch(parts: Sequence[protocol.Part]) -> tuple[list[Message], str]:
    """The messages in a branch, and the role of the last one if it is still open."""
    found: list[Message] = []
    opened = outside = ""
    for part in parts:
        if isinstance(part, protocol.Image):
            if not opened:
                raise InvalidRequest("an image stands in a message")
            found[-1].content.append(part)
            continue
        if not isinstance(part, protocol.Text):
            raise InvalidRequest("token ids mean nothing to this server")
        pieces = _MARK.split(part.text) if part.special else [part.text]
        for index, piece in enumerate(pieces):
            if index % 2:
                opened = "" if piece == "end" else piece
                if opened:
                    found.append(Message(opened))
            elif opened:
                found[-1].content += [piece] if piece else []
            else:
                outside += piece
    if found and outside.strip():
        raise InvalidRequest(f"text outside of messages cannot be sent: {outside!r}")
    return found, opened


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As OpenAI's interface has them: the content is a text, or with images a list of parts."""
    return [{"role": each.role, "content": _openai_content(each)} for each in messages]


def _openai_content(message: Message) -> str | list[dict[str, Any]]:
    if all(isinstance(piece, str) for piece in message.content):
        return message.text
    return [
        {"type": "text", "text": piece}
        if isinstance(piece, str)
        else {"type": "image_url", "image_url": {"url": data_url(piece)}}
        for piece in message.content
    ]


def data_url(image: protocol.Image) -> str:
    """An address that holds the image itself, unless it has one of its own."""
    return image.url or f"data:{image.media_type};base64,{encoded(image)}"


def encoded(image: protocol.Image) -> str:
    return base64.b64encode(image.data).decode()


def schema_of(constraint: protocol.Constraint) -> dict[str, Any]:
    """Raises InvalidRequest for what is no JSON schema of an object."""
    if constraint.kind != "json_schema":
        raise InvalidRequest(
            f"a constraint of the kind {constraint.kind} cannot be asked for here, only json_schema"
        )
    schema = json.loads(constraint.source)
    return schema if isinstance(schema, dict) else {}


def response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's form of a schema that the answer must fit."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
