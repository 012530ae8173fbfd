"""Parts of an answer, notations of calls, and the interface of formats."""

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
# Parts of an answer, piece by piece as it is written, and as a whole.


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thoughts."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """Beginning of a tool call; arguments up to the next one are its own."""

    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the last call's arguments."""

    text: str


Delta = Content | Reasoning | CallBegin | CallArguments


class Call(msgspec.Struct, frozen=True):
    """Whole call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    """All deltas of an answer together."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    deltas: tuple[Delta, ...] = field(default=(), compare=False)
    """Deltas of the answer, in order."""

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Answer:
        """Join deltas; white space around calls has no meaning and is dropped."""
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
# Tags in text of which perhaps only the beginning has come.


_PIECE_CHARACTERS = 4096


def first_tag(text: str, tags: Collection[str]) -> tuple[int, str] | None:
    """Find the first of the tags: its place, and the tag."""
    return min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=None)


def possible_begin(text: str, tags: Collection[str]) -> int:
    """Count the characters at the end of `text` that may be the beginning of a tag."""
    firsts = {tag[:1] for tag in tags}
    most = max(map(len, tags), default=1) - 1
    for at in range(max(len(text) - most, 0), len(text)):
        if text[at] in firsts:
            end = text[at:]
            if any(len(tag) > len(end) and tag.startswith(end) for tag in tags):
                return len(end)
    return 0


def pieces(text: str) -> Iterator[str]:
    """Split the text into pieces that a parser can search from the start for every tag."""
    for at in range(0, len(text), _PIECE_CHARACTERS):
        yield text[at : at + _PIECE_CHARACTERS]


# Json text ----------------------------------------------------------------------------------------
#
# Growing JSON text: the search for the end of a value.


_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of an object or array whose text comes in pieces."""

    def __init__(self, depth: int = 0, stops: tuple[str, ...] = ()) -> None:
        """`depth`: brackets already open. `stops`: tags that end the value outside a string, where
        the model forgot a bracket."""
        self.closed = False
        """True once the value's last bracket has been closed."""
        self.stopped = False
        """True if a tag ended the value before that."""
        self._depth = depth
        self._stops = stops
        self._next = re.compile("|".join([*map(re.escape, stops), r'["{}\[\]]']))
        self._in_string = False
        self._escaped = False

    @property
    def ended(self) -> bool:
        return self.closed or self.stopped

    def feed(self, text: str) -> int:
        """Count the characters of `text` that belong to the value. The rest is behind its end or,
        if it has not ended, may be the beginning of a tag: feed it again."""
        at, sure = 0, len(text) - possible_begin(text, self._stops)
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                continue
            match = self._next.search(text, at)
            if match is not None and match[0] in self._stops:
                self.stopped = True
                return match.start()
            if match is None or match.start() >= sure:
                return max(at, sure)
            at = match.end()
            if match[0] == '"':
                self._in_string = True
            elif match[0] in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self.closed = True
                    return at
        return at

    def _string(self, text: str, at: int) -> int:
        """Return the place behind the string's end, or the text's end."""
        if self._escaped:
            self._escaped, at = False, at + 1
        while (match := _IN_STRING.search(text, at)) is not None:
            at = match.end()
            if match[0] == '"':
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
    """Notation of calls, and their places.

    A call is a JSON object with a name and arguments. Where `header` matches behind the tag, a call
    is the name in the group `name`, then the arguments.
    """

    begin: str
    """Tag before a call."""
    opening: str
    between: str
    """`opening` and `between` stand around a call's name, as the model has learnt."""
    end: str
    """Text behind the arguments."""
    fence: str = ""
    """Tag that ends the arguments behind a `header`, and is no content."""
    ends: tuple[str, ...] = ()
    """Tags that may stand behind a call, in this order, and are no content."""
    again: str = ""
    """Text between two calls behind one tag."""
    around: Around = LINES
    """Texts around several calls."""
    array: bool = False
    """True if the calls may stand in a JSON array."""
    header: re.Pattern[str] | None = None
    noise: tuple[str, ...] = ()
    """Tags before calls that are no content."""
    bare: bool = False
    """True if an answer that begins with an object may be a call, without a tag."""

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
"""Calls of Hermes and Qwen models, and of the embedded one."""

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
    MISTRAL, opening='[TOOL_CALLS] [{"name": "', around=("[TOOL_CALLS] [", ", ", "]")
)
"""Calls of Mistral's models with SentencePiece's tokens, whose templates have a blank there."""

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
"""Calls of Mistral's newer models."""

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
"""Calls of DeepSeek V3 and R1."""

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
"""Names of the offered tools, with the schemas of their arguments."""


class Parser(Protocol):
    """Parser of a growing answer.

    The deltas do not depend on where the pieces of text end. No text of the model is lost: text
    that looks like a call and is none is content. The work is linear in the text's length.
    """

    def feed(self, text: str) -> list[Delta]:
        """Add text; return the deltas now certain."""

    def finish(self) -> list[Delta]:
        """Return the remaining deltas when the answer has ended."""


@dataclass(frozen=True)
class Format(ABC):
    """Notation of one family's answers."""

    calls: Calls

    @property
    def trigger(self) -> str:
        """Text that begins every call."""
        calls = self.calls
        tags = (tag for tag in (calls.begin, *calls.noise) if calls.opening.startswith(tag))
        return next(tags, calls.opening)

    @property
    def end(self) -> str:
        """Text behind a call's arguments."""
        return self.calls.end

    @property
    def around(self) -> Around:
        """Texts around several calls."""
        return self.calls.around

    def begin(self, name: str) -> str:
        """Return the beginning of a call of the tool `name`, up to its arguments."""
        spelt = name if self.calls.header else msgspec.json.encode(name).decode()[1:-1]
        return self.calls.opening + spelt + self.calls.between

    def begin_alone(self, name: str) -> tuple[str, str] | None:
        """Return another beginning of a call of the tool `name`, without the texts around several
        calls: (tag, all up to the arguments). None without another one."""
        tag, begin = self.calls.begin, self.begin(name)
        if begin.startswith(tag):
            return None
        _, found, behind = begin.partition(tag)
        return tag, tag + (behind if found else begin)

    @property
    @abstractmethod
    def always(self) -> bool:
        """Return whether answers must be parsed even without tools: for their thoughts."""

    @property
    def writes_json(self) -> bool:
        """Return whether a call's arguments are one JSON text."""
        return True

    def content(self, content: tool_calls.Content) -> tool_calls.Content:
        """Adapt the constraint `content` of JSON arguments to the notation of arguments. Raises
        InvalidConstraint where that is impossible."""
        return content

    @abstractmethod
    def parser(self, prompt_end: str, tools: Schemas, reasoning: bool) -> Parser:
        """Make a parser of an answer that follows `prompt_end`.

        `tools` are the offered ones. Without tools, calls are content; without `reasoning`,
        thoughts are.
        """

    @abstractmethod
    def thoughts(self, prompt_end: str) -> Thoughts | None:
        """Return the thoughts that may follow the prompt; None if none can."""

    def leave_thoughts(self, prompt_end: str) -> str:
        """Return the text that ends thoughts begun by the prompt; "" if the prompt begins none."""
        return ""

    def no_thoughts(self) -> str:
        """Return the text that keeps a thinking model from thinking; "" if there is none."""
        return ""

    def answer_prefix(self, prompt_end: str) -> str:
        """Return the text from the prompt's end to the text for the user."""
        return self.leave_thoughts(prompt_end)
