"""Backends without a model: `Scripted` with given replies, `Recorded` with a real backend's."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rootlace.client.channel import Ask, BranchText, Channel, LocalChannel
from rootlace.client.endpoint import RuntimeEndpoint, close, compute, endpoint_of
from rootlace.language.tools import as_text
from rootlace.wire import protocol
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.sampling import PLAIN, SamplingParams

# Replies ------------------------------------------------------------------------------------------
#
# Events of generations and selections whose texts are known.


Tokenize = Callable[[str], Sequence[str]]
"""Function that splits a text into tokens; the joined tokens are the text."""

_LOGPROB = -0.5


def generated(
    op: protocol.Generate,
    prompt: str,
    texts: Sequence[str],
    tokenize: Tokenize,
    *,
    number: Callable[[int, str], int] = lambda at, token: at,
    cached: int = 0,
    chunk: int = 1,
) -> list[protocol.Event]:
    """Make the events of a `Generate` whose model writes `texts`, one per sample. Texts are cut at
    stop strings and at `max_tokens`. `number(at, token)` is the id of the token at index `at`. A
    stream has `chunk` tokens per event."""
    events: list[protocol.Event] = []
    outputs = []
    for index, written in enumerate(texts):
        tokens, reason, matched = cut(written, op.params, tokenize)
        ids = tuple(number(at, token) for at, token in enumerate(tokens))
        logprobs: tuple[protocol.TokenLogprob, ...] = ()
        if op.params.logprobs:
            numbered = zip(ids, tokens, strict=True)
            logprobs = tuple(protocol.TokenLogprob(at, text, _LOGPROB) for at, text in numbered)
        outputs.append(protocol.Output("".join(tokens), ids, reason, matched, logprobs))
        for start in range(0, len(tokens), chunk) if op.stream else ():
            piece = slice(start, start + chunk)
            text = "".join(tokens[piece])
            events.append(protocol.Chunk(op.op, index, text, ids[piece], logprobs[piece]))
    usage = protocol.Usage(
        prompt_tokens=len(tokenize(prompt)),
        cached_tokens=cached,
        completion_tokens=sum(len(output.token_ids) for output in outputs),
    )
    return [*events, protocol.Generated(op.op, tuple(outputs), usage)]


def cut(
    text: str, params: protocol.SamplingParams, tokenize: Tokenize
) -> tuple[list[str], Any, str | None]:
    """Return the tokens before the first stop string or the limit, the reason, and the stop."""
    stops = [(at + len(stop), at, stop) for stop in params.stop if (at := text.find(stop)) >= 0]
    for index, pattern in enumerate(params.stop_regex):
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise InvalidRequest(f"stop_regex[{index}]: {error}") from None
        if search(""):
            raise InvalidRequest(f"stop_regex[{index}]: the pattern matches the empty text")
        searched = ((end, search(text[:end])) for end in range(len(text) + 1))
        stops += [(end, match.start(), pattern) for end, match in searched if match][:1]
    matched = None
    if stops:
        _, position, matched = min(stops)
        text = text[:position]
    tokens = list(tokenize(text))
    if params.max_tokens is not None and len(tokens) > params.max_tokens:
        return tokens[: params.max_tokens], "length", None
    return tokens, "stop", matched


def selected(
    op: protocol.Select, prompt: str, index: int, tokenize: Tokenize, *, cached: int = 0
) -> list[protocol.Event]:
    """Make the event of a `Select` that chooses number `index`."""
    scores = tuple(-1.0 - abs(number - index) for number in range(len(op.choices)))
    tokens = tuple(
        (protocol.TokenLogprob(number, choice, score),)
        for number, (choice, score) in enumerate(zip(op.choices, scores, strict=True))
    )
    usage = protocol.Usage(prompt_tokens=len(tokenize(prompt)), cached_tokens=cached)
    return [protocol.Selected(op.op, op.choices[index], index, scores, usage, tokens)]


# Scripted -----------------------------------------------------------------------------------------


CHAT = protocol.ChatFormat(
    roles={
        role: protocol.RoleFormat(begin=f"<|{role}|>", end="<|end|>")
        for role in ("system", "user", "assistant", "tool")
    }
)
_TOKEN = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True)
class Call:
    """Call of a program: its `gen` or `select`, the text before it, and the reply."""

    prompt: str
    op: Ask
    reply: str

    @property
    def name(self) -> str:
        """Return the variable's name, or ""."""
        return self.op.name

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters of a `gen`."""
        return self.op.params if isinstance(self.op, protocol.Generate) else SamplingParams()

    @property
    def constraint(self) -> protocol.Constraint | None:
        return self.op.constraint if isinstance(self.op, protocol.Generate) else None

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the choices of a `select`."""
        return self.op.choices if isinstance(self.op, protocol.Select) else ()


class Scripted(RuntimeEndpoint):
    """Backend with given replies: `Scripted(answer="yes")` by the variable's name, or
    `Scripted({"capital of Norway": "Oslo"})` by a pattern (of `re`) in the prompt. Names come
    first, then patterns in their order, then `default`.

    A reply is a text; an exception, which the operation raises; another value, written as JSON; or
    a function of the prompt that returns one of these. A list of replies is given in turn, each
    once; `Scripted(["a", "b"])` gives all replies in turn. The reply to a `select` is one of its
    choices. A reply that breaks its constraint fails, unless `check` is False. Texts are cut at
    stop strings and at `max_tokens`, counted in tokens of `tokenize` (words, by default). Prompts
    are cached as in a tree.

    `calls` are the requested generations and selections, in their order.
    """

    def __init__(
        self,
        replies: Any = None,
        /,
        *,
        default: Any = None,
        check: bool = True,
        tokenize: Tokenize = _TOKEN.findall,
        chat: protocol.ChatFormat = CHAT,
        **by_name: Any,
    ) -> None:
        patterns = replies if isinstance(replies, Mapping) else {}
        self._named = {name: _turns(reply) for name, reply in by_name.items()}
        self._patterns = [(re.compile(key), _turns(reply)) for key, reply in patterns.items()]
        rest = default if isinstance(replies, Mapping) or replies is None else replies
        self._default = None if rest is None else _turns(rest)
        self._check = check
        self._tokenize = tokenize
        self._cached: dict[str, Any] = {}
        self._ids: dict[str, int] = {}
        self.calls: list[Call] = []
        self._address = "scripted"
        # Token ids are this backend's own: for another one, a saved state is text.
        path = f"scripted {uuid.uuid4().hex}"
        model = protocol.ModelInfo(
            "scripted", path, 1 << 20, 1 << 16, 1 << 20, 16, chat, images=True
        )
        self._channel = LocalChannel(model, self._answer, self._spell)

    def connect(self) -> Channel:
        return self._channel

    def close(self) -> None:
        """Do nothing: no connection is open."""

    @property
    def open_branches(self) -> int:
        """Return the number of branches that no program has closed yet."""
        return self._channel.open_branches

    def _answer(self, branch: BranchText, op: Ask) -> list[protocol.Event]:
        prompt = branch.text
        cached = self._reuse(prompt)
        if isinstance(op, protocol.Select):
            reply = self._reply(prompt, op)
            if reply not in op.choices:
                raise InvalidRequest(f"the scripted reply {reply!r} is none of {list(op.choices)}")
            index = op.choices.index(reply)
            events = selected(op, prompt, index, self._tokenize, cached=cached)
        else:
            texts = [self._reply(prompt, op) for _ in range(op.params.n)]
            events = generated(
                op, prompt, texts, self._tokenize, number=self._number, cached=cached
            )
            reply = texts[0]
        self._reuse(prompt + reply)
        return events

    def _reply(self, prompt: str, op: Ask) -> str:
        what = "select" if isinstance(op, protocol.Select) else "gen"
        what_for = f"{what}({op.name!r}) after {_end(prompt)}"
        turns = self._find(prompt, op)
        if turns is None:
            meant = any(pattern.pattern == op.name for pattern, _ in self._patterns)
            hint = f"; by the variable's name: Scripted({op.name}=...)" if meant else ""
            raise InvalidRequest(f"nothing is scripted for {what_for}{hint}")
        try:
            reply = next(turns)
        except StopIteration:
            raise InvalidRequest(f"no reply is left for {what_for}") from None
        if callable(reply) and not isinstance(reply, type):
            reply = reply(prompt)
        if isinstance(reply, Exception):
            raise reply
        text = as_text(reply)
        self.calls.append(Call(prompt, op, text))
        if self._check and isinstance(op, protocol.Generate) and op.constraint is not None:
            check(text, op.constraint)
        return text

    def _find(self, prompt: str, op: Ask) -> Iterator[Any] | None:
        if op.name in self._named:
            return self._named[op.name]
        for pattern, turns in self._patterns:
            if pattern.search(prompt):
                return turns
        return self._default

    def _number(self, _: int, token: str) -> int:
        return self._ids.setdefault(token, len(self._ids))

    def _spell(self, token_id: int) -> str:
        return next((token for token, known in self._ids.items() if known == token_id), "?")

    def _reuse(self, text: str) -> int:
        """Return the number of cached tokens of `text`, and cache all of them."""
        node, cached = self._cached, 0
        for token in self._tokenize(text):
            cached += token in node
            node = node.setdefault(token, {})
        return cached

    def __repr__(self) -> str:
        return f"Scripted({len(self.calls)} calls)"


def _turns(reply: Any) -> Iterator[Any]:
    if isinstance(reply, (list, tuple)):
        return iter(reply)
    return iter(lambda: reply, _NEVER)


_NEVER = object()


def _end(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 80 else f"...{prompt[-77:]}")


def check(text: str, constraint: protocol.Constraint) -> None:
    """Raise InvalidRequest for a text that breaks a pattern, choices, or a JSON schema. Schemas
    need the jsonschema package; without it, the text must be JSON. Also raise if no tag follows a
    trigger, such as a tool call's."""
    source = constraint.source
    if constraint.kind == "regex" and not re.fullmatch(source, text):
        raise InvalidRequest(f"the scripted reply {text!r} does not match the pattern {source!r}")
    if constraint.kind == "choices" and text not in json.loads(source):
        raise InvalidRequest(f"the scripted reply {text!r} is none of {source}")
    if constraint.kind == "json_schema":
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(f"the scripted reply {text!r} is no JSON: {error}") from None
        _validate(value, json.loads(source))
    if constraint.kind not in ("regex", "choices", "json_schema", "ebnf"):
        _check_tags(text, json.loads(source))


def _check_tags(text: str, source: Any) -> None:
    nodes = [source]
    for node in nodes:  # which grows
        fields = node.items() if isinstance(node, dict) else enumerate(node)
        below = [each for key, each in fields if key not in ("schema", "json_schema")]
        nodes += [each for each in below if isinstance(each, dict | list)]
    tags = [node for node in nodes if isinstance(node, dict)]
    begins = tuple(tag["begin"] for tag in tags if isinstance(tag.get("begin"), str))
    ends = [tag["end"] for tag in tags if isinstance(tag.get("end"), str)]
    whole = f"({'|'.join(map(re.escape, begins))}).*?({'|'.join(map(re.escape, ends))})"
    insides = [tag.span() for tag in re.finditer(whole, text, re.DOTALL)]
    triggers = [each for tag in tags for each in tag.get("triggers", ())]
    places = [at.start() for each in triggers for at in re.finditer(re.escape(each), text)]
    loose = [at for at in places if not any(start < at < end for start, end in insides)]
    wrong = [at for at in loose if not text.startswith(begins, at)]
    if not triggers and any(tag.get("at_least_one") for tag in tags):
        wrong = [] if any(begin in text for begin in begins) else [0]
    if wrong:
        raise InvalidRequest(
            f"the scripted reply has no tag at {text[wrong[0] : wrong[0] + 80]!r}; tags begin with "
            f"{' or '.join(map(repr, begins))}"
        )


def _validate(value: Any, schema: Any) -> None:
    try:
        import jsonschema
    except ImportError:
        return
    error = next(iter(jsonschema.Draft202012Validator(schema).iter_errors(value)), None)
    if error is not None:
        raise InvalidRequest(f"the scripted reply does not fit its schema: {error.message}")


# Recorded -----------------------------------------------------------------------------------------


AnswerEvent = protocol.Generated | protocol.Selected


class Cassette(msgspec.Struct, omit_defaults=True):
    """Contents of a cassette's file: the answers to each question, in recorded order."""

    model: protocol.ModelInfo
    answers: dict[str, list[AnswerEvent]] = {}


class Recorded(RuntimeEndpoint):
    """Backend with answers from the cassette at `path`, a JSON file. A question is the text before
    a `gen` or `select` and all its options. A repeated question gets its answers in turn, then the
    last one again.

    With a `backend`, a missing question is asked there and recorded; without one, it fails. Raises
    InvalidRequest for a missing file, or one that is no cassette.
    """

    def __init__(self, path: str | Path, backend: Any = None) -> None:
        self._path = Path(path)
        self._real = None if backend is None else endpoint_of(backend)
        self._cassette = self._read()
        self._asked: dict[str, int] = {}
        self._address = str(path)
        self._channel = LocalChannel(self._cassette.model, self._answer)

    def _read(self) -> Cassette:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Cassette)
        except FileNotFoundError:
            if self._real is None:
                raise InvalidRequest(
                    f"there is no cassette {self._path}; record one with backend=..., or pytest "
                    "--rootlace-record URL"
                ) from None
            return Cassette(self._real.model_info)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{self._path} is no cassette: {error}") from None

    def connect(self) -> Channel:
        return self._channel

    def close(self) -> None:
        """Do nothing: no connection is open."""

    def _answer(self, branch: BranchText, op: Ask) -> list[protocol.Event]:
        key = _key(branch, op)
        answers = self._cassette.answers.get(key, [])
        turn = self._asked.get(key, 0)
        self._asked[key] = turn + 1
        if self._real is not None and turn >= len(answers):
            answers = [*answers, _ask(self._real.connect(), branch, op)]
            self._cassette.answers[key] = answers
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(msgspec.json.format(msgspec.json.encode(self._cassette)))
        if not answers:
            raise InvalidRequest(
                f"the cassette {self._path} has no answer to {op.name!r} after "
                f"{branch.text[-80:]!r}; record it with backend=..., or pytest "
                "--rootlace-record URL"
            )
        event = msgspec.structs.replace(answers[min(turn, len(answers) - 1)], op=op.op)
        events: list[protocol.Event] = [event]
        if (
            isinstance(op, protocol.Generate)
            and op.stream
            and isinstance(event, protocol.Generated)
        ):
            chunks = [
                protocol.Chunk(op.op, index, output.text, output.token_ids, output.logprobs)
                for index, output in enumerate(event.outputs)
            ]
            events[:0] = chunks
        return events


def _key(branch: BranchText, op: Ask) -> str:
    """Return a question's key, independent of operation and branch ids."""
    plain: dict[str, Any] = {"op": 0, "branch": 0, "name": "", "handling": PLAIN}
    if isinstance(op, protocol.Generate):
        plain["stream"] = False
    question = (branch.text, msgspec.structs.replace(op, **plain))
    return hashlib.sha256(msgspec.json.encode(question, order="sorted")).hexdigest()[:32]


def _ask(real: Channel, branch: BranchText, op: Ask) -> AnswerEvent:
    plain: dict[str, Any] = {"stream": False} if isinstance(op, protocol.Generate) else {}

    def again(number: int, on: int) -> protocol.Op:
        return msgspec.structs.replace(op, op=number, branch=on, **plain)

    opened, answers = compute(real, branch.parts, last=again)
    close(real, opened)
    event = answers[-1].get()
    assert isinstance(event, AnswerEvent)
    return event
