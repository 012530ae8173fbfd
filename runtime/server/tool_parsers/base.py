"""What an answer consists of, how calls are written, and what a format is."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rootlace.wire import tool_calls
from rootlace.wire.protocol import Thoughts
from rootlace.wire.tool_calls import LINES, Around

# Deltas -------------------------------------------------------------------------------------------
#
# What an answer consists of, piece by piece as it is written, and as a whole.


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote to itself."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins; what follows until the next one are its arguments."""

    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the last call's arguments."""

    text: str


Delta = Content | Reasoning | CallBegin | CallArguments


class Call(msgspec.Struct, frozen=True):
    """A whole call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """All deltas of an answer together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    deltas: tuple[Delta, ...] = field(default=(), compare=False)
    """What it was made of, in order."""

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Answer:
        """White space around calls says nothing and is left out."""
        deltas = tuple(deltas)
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        calls: list[tuple[str, list[str]]] = []
        for delta in deltas:
            if isinstance(delta, CallBegin):
                calls.append((delta.name, []))
            elif isinstance(delta, CallArguments):
                calls[-1][1].append(delta.text)
        return cls(
            content.strip() if calls else content,
            reasoning,
            [Call(name, "".join(arguments)) for name, arguments in calls],
            deltas,
        )


# Tags ---------------------------------------------------------------------------------------------
#
# Tags in text of which only the beginning may have come.


_PIECE_CHARACTERS = 4096


def first_tag(text: str, tags: Collection[str]) -> tuple[int, str] | None:
    """Where the first of the tags stands, and which it is."""
    return min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)


def possible_begin(text: str, tags: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a tag."""
    firsts = {tag[:1] for tag in tags}
    most = max(map(len, tags), default=1) - 1
    for at in range(max(len(text) - most, 0), len(text)):
        if text[at] in firsts:
            end = text[at:]
            if any(len(tag) > len(end) and tag.startswith(end) for tag in tags):
                return len(end)
    return 0


def pieces(text: str) -> Iterator[str]:
    """The text in pieces that a parser can search from their beginning for every tag in them."""
    for at in range(0, len(text), _PIECE_CHARACTERS):
        yield text[at : at + _PIECE_CHARACTERS]


# Json text ----------------------------------------------------------------------------------------
#
# JSON that is still being written: where a value ends.


_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of an object or array whose text comes in pieces."""

    def __init__(self, depth: int = 0, stops: tuple[str, ...] = ()) -> None:
        """`depth`: how many brackets are open already. `stops`: tags that end the value if they
        stand outside a string, where the model forgot a bracket."""
        self.closed = False
        """Whether the value's last bracket has been closed."""
        self.stopped = False
        """Whether a tag ended the value before that."""
        self._depth = depth
        self._stops = stops
        self._next = re.compile("|".join([*map(re.escape, stops), r'["{}\[\]]']))
        self._in_string = False
        self._escaped = False

    @property
    def ended(self) -> bool:
        return self.closed or self.stopped

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the value. What is left is behind its end or,
        where it has not ended, may be the beginning of a tag: it has to be fed again."""
        at, sure = 0, len(text) - possible_begin(text, self._stops)
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                continue
            found = self._next.search(text, at)
            if found is not None and found[0] in self._stops:
                self.stopped = True
                return found.start()
            if found is None or found.start() >= sure:
                return max(at, sure)
            at = found.end()
            if found[0] == '"':
                self._in_string = True
            elif found[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self.closed = True
                    return at
        return at

    def _string(self, text: str, at: int) -> int:
        """The place behind the string's end, or that of the text."""
        if self._escaped:
            self._escaped, at = False, at + 1
        while (found := _IN_STRING.search(text, at)) is not None:
            at = found.end()
            if found[0] == '"':
                self._in_string = False
                return at
            if at == len(text):
                self._escaped = True
                return at
            at += 1
        return len(text)


# Calls --------------------------------------------------------------------------------------------


_NAME_CHARACTERS = 128


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Where calls stand, and how they are written.

    A call is a JSON object with a name and arguments or, where `header` matches what stands behind
    the tag, the name in the group `name` and then the arguments.
    """

    begin: str
    """The tag before a call."""
    opening: str
    between: str
    """What the model is used to around a call's name."""
    end: str
    """What stands behind the arguments."""
    fence: str = ""
    """What ends the arguments behind a `header`, and is no content."""
    ends: tuple[str, ...] = ()
    """Tags that may stand behind a call, in this order, and are no content."""
    again: str = ""
    """What stands between two calls behind one tag."""
    around: Around = LINES
    """How they stand together."""
    array: bool = False
    """Whether the calls may stand in a JSON array."""
    header: re.Pattern[str] | None = None
    noise: tuple[str, ...] = ()
    """Tags before calls that are no content."""
    bare: bool = False
    """Whether an answer that begins with an object may be a call, without a tag."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Tags that end a call whose JSON was left open."""
        return tuple(tag for tag in (self.begin, self.fence, *self.ends) if tag)


HERMES = Calls(
    begin="<tool_call>",
    opening='<tool_call>\n{"name": "',
    between='", "arguments": ',
    end="}\n</tool_call>",
    ends=("</tool_call>",),
)
"""Of Hermes and Qwen models, and of the embedded one."""

LLAMA3 = Calls(
    begin="<|python_tag|>",
    opening='{"name": "',
    between='", "parameters": ',
    end="}",
    again=";",
    around=("", ";", ""),
    bare=True,
)

MISTRAL = Calls(
    begin="[TOOL_CALLS]",
    opening='[TOOL_CALLS][{"name": "',
    between='", "arguments": ',
    end="}]",
    again=",",
    around=("[TOOL_CALLS][", ", ", "]"),
    array=True,
)

MISTRAL_BLANK = msgspec.structs.replace(
    MISTRAL,
    opening='[TOOL_CALLS] [{"name": "',
    around=("[TOOL_CALLS] [", ", ", "]"),
)
"""Of Mistral's models with SentencePiece's tokens, whose templates have a blank there."""

MISTRAL_ARGS = Calls(
    begin="[TOOL_CALLS]",
    opening="[TOOL_CALLS]",
    between="[ARGS]",
    end="",
    header=re.compile(
        rf"\s{{0,8}}(?P<name>[\w.-]{{1,{_NAME_CHARACTERS}}})(?:\[CALL_ID\]\w{{1,64}})?"
        r"(?:\[ARGS\])?\s{0,8}(?=\{)"
    ),
    array=True,
    again=",",
    around=("", "", ""),
)
"""Of Mistral's newer models."""

_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_TAGS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

DEEPSEEK = Calls(
    begin="<｜tool▁call▁begin｜>",
    opening=f"{_DEEPSEEK_BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    between="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    header=re.compile(
        rf"function<｜tool▁sep｜>(?P<name>[^\n]{{1,{_NAME_CHARACTERS}}})\n```json\s{{0,8}}(?=\{{)"
    ),
    fence="```",
    ends=_DEEPSEEK_TAGS,
    around=(_DEEPSEEK_BEGIN, "\n", _DEEPSEEK_TAGS[1]),
    noise=(_DEEPSEEK_BEGIN,),
)
"""Of DeepSeek V3 and R1."""

DEEPSEEK_31 = Calls(
    begin="<｜tool▁call▁begin｜>",
    opening=f"{_DEEPSEEK_BEGIN}<｜tool▁call▁begin｜>",
    between="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    header=re.compile(rf"(?P<name>[^<\n]{{1,{_NAME_CHARACTERS}}})<｜tool▁sep｜>\s{{0,8}}(?=\{{)"),
    ends=_DEEPSEEK_TAGS,
    around=(_DEEPSEEK_BEGIN, "", _DEEPSEEK_TAGS[1]),
    noise=(_DEEPSEEK_BEGIN,),
)


# Format -------------------------------------------------------------------------------------------


Schemas = Mapping[str, Mapping[str, Any] | None]
"""The names of the tools that were offered, and the schemas of their arguments."""


class Parser(Protocol):
    """Takes an answer as it is written.

    What comes out does not depend on where the pieces of text end. Nothing that the model wrote is
    lost: what looks like a call and is none is content. The work grows with
    the text's length, not with its square.
    """

    def feed(self, text: str) -> list[Delta]:
        """What is decided now."""

    def finish(self) -> list[Delta]:
        """What is left when the answer has ended."""


@dataclass(frozen=True)
class Format(ABC):
    """How one family of models writes its answers."""

    calls: Calls

    @property
    def trigger(self) -> str:
        """What every call begins with."""
        calls = self.calls
        tags = (tag for tag in (calls.begin, *calls.noise) if calls.opening.startswith(tag))
        return next(tags, calls.opening)

    @property
    def end(self) -> str:
        """What stands behind a call's arguments."""
        return self.calls.end

    @property
    def around(self) -> Around:
        """How calls stand together."""
        return self.calls.around

    def begin(self, name: str) -> str:
        """What a call of the tool `name` begins with, up to its arguments."""
        spelt = name if self.calls.header else msgspec.json.encode(name).decode()[1:-1]
        return self.calls.opening + spelt + self.calls.between

    def begin_alone(self, name: str) -> tuple[str, str] | None:
        """What else begins a call of the tool `name`, without what is around calls that stand
        together: a tag, and all up to the arguments. None where nothing else does."""
        tag, begin = self.calls.begin, self.begin(name)
        if begin.startswith(tag):
            return None
        _, found, behind = begin.partition(tag)
        return tag, tag + (behind if found else begin)

    @property
    @abstractmethod
    def always(self) -> bool:
        """Whether answers are to be parsed even if nobody offers a tool: they may have thoughts."""

    @property
    def writes_json(self) -> bool:
        """Whether a call's arguments are one JSON text."""
        return True

    def content(self, content: tool_calls.Content) -> tool_calls.Content:
        """What holds a call's arguments as they are written to `content`, which holds JSON. Raises
        InvalidConstraint where they cannot be held so."""
        return content

    @abstractmethod
    def parser(self, prompt_end: str, tools: Schemas, reasoning: bool) -> Parser:
        """A parser of an answer that follows `prompt_end`.

        `tools` are those that were offered. Calls are not looked for where there are none, nor
        thoughts without `reasoning`: then they are content.
        """

    @abstractmethod
    def thoughts(self, prompt_end: str) -> Thoughts | None:
        """Those that may come behind the prompt. None where none come."""

    def leave_thoughts(self, prompt_end: str) -> str:
        """What ends thoughts that the prompt begins; empty where it begins none."""
        return ""

    def no_thoughts(self) -> str:
        """What a model is shown that is not to think where it may; empty where nothing says so."""
        return ""

    def answer_prefix(self, prompt_end: str) -> str:
        """What leads from the prompt to the place where text for the user stands."""
        return self.leave_thoughts(prompt_end)
