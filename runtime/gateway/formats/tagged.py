"""Formats whose calls stand in the text behind a tag."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from rootlace.runtime.gateway.formats.deltas import (
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Reasoning,
)
from rootlace.runtime.gateway.formats.json_text import JsonEnd

_NAME_CHARACTERS = 128
# No header is longer; what has not become one by then is text.
_HEADER_CHARACTERS = 512
_OBJECT = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)


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
    ends: tuple[str, ...] = ()
    """Tags behind a call that are no content."""
    again: str = ""
    """What stands between two calls behind one tag."""
    array: bool = False
    """Whether the calls may stand in a JSON array."""
    header: re.Pattern[str] | None = None
    noise: tuple[str, ...] = ()
    """Tags before calls that are no content."""
    bare: bool = False
    """Whether an answer that begins with an object is a call, without a tag."""


@dataclass(frozen=True)
class Tagged:
    """A format of tagged calls and thoughts; `think` are the tags around thoughts."""

    calls: Calls
    think: tuple[str, str] | None = None

    @property
    def always(self) -> bool:
        return self.think is not None

    @property
    def trigger(self) -> str:
        begin, opening = self.calls.begin, self.calls.opening
        return begin if opening.startswith(begin) else opening

    @property
    def end(self) -> str:
        return self.calls.end

    def parser(self, prompt_end: str, calls: bool, reasoning: bool) -> TaggedParser:
        think = self.think if reasoning else None
        thinking = think is not None and prompt_end.rstrip().endswith(think[0])
        return TaggedParser(self.calls if calls else None, think, thinking)

    def begin(self, name: str) -> str:
        spelt = name if self.calls.header else msgspec.json.encode(name).decode()[1:-1]
        return self.calls.opening + spelt + self.calls.between

    def leave_thoughts(self, prompt_end: str) -> str:
        if self.think is None or not prompt_end.rstrip().endswith(self.think[0]):
            return ""
        return f"\n{self.think[1]}\n\n"

    def answer_prefix(self, prompt_end: str) -> str:
        return self.leave_thoughts(prompt_end)


class _State(Enum):
    TEXT = auto()
    THOUGHT = auto()
    HEADER = auto()  # behind the tag of a call, before its arguments
    ARGUMENTS = auto()
    REST = auto()  # behind the arguments, before the end of the object they stand in
    TAIL = auto()  # behind a call


class TaggedParser:
    """Parses an answer; see `format.Parser`. A call is given as it is written."""

    def __init__(
        self, calls: Calls | None, think: tuple[str, str] | None = None, thinking: bool = False
    ) -> None:
        self._calls = calls
        self._think = think
        self._buffer = ""
        self._out: list[Delta] = []
        self._state = _State.THOUGHT if thinking else _State.TEXT
        self._said = False  # the answer has begun: thoughts come before it
        self._spaces = ""  # white space that says nothing unless text follows it
        self._trim = thinking  # white space before the next text says nothing
        self._opened = ""  # what stands before a call's object, if it turns out to be none
        self._json = JsonEnd()
        self._object = False
        self._steps: dict[_State, Callable[[], bool]] = {
            _State.TEXT: self._text,
            _State.THOUGHT: self._thought,
            _State.HEADER: self._header,
            _State.ARGUMENTS: self._arguments,
            _State.REST: self._rest,
            _State.TAIL: self._tail,
        }

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._buffer and self._steps[self._state]():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Delta]:
        if self._state is _State.HEADER:
            self._take_whole(self._buffer)
        elif self._state is _State.THOUGHT:
            self._reason(self._buffer)
        elif self._state is _State.TEXT or (self._state is _State.TAIL and self._buffer.strip()):
            self._say(self._buffer)
        self._buffer = ""
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------ one step per state; True: go on

    def _text(self) -> bool:
        calls, tags = self._calls, []
        if self._think is not None and not self._said:
            tags.append(self._think[0])
        if calls is not None:
            if calls.bare and not self._said and self._buffer.lstrip().startswith("{"):
                self._state, self._opened = _State.HEADER, ""
                return True
            if calls.bare and not self._said and not self._buffer.strip():
                return False
            tags += [calls.begin, *calls.noise]
        found = _first(self._buffer, tags)
        if found is None:
            keep = _possible_begin(self._buffer, tags)
            text = self._buffer[: len(self._buffer) - keep]
            self._buffer = self._buffer[len(text) :]
            self._say(text)
            return False
        at, tag = found
        self._say(self._buffer[:at])
        self._buffer = self._buffer[at + len(tag) :]
        if self._think is not None and tag == self._think[0]:
            if self._said:
                self._say(tag)
            else:
                self._state, self._trim, self._spaces = _State.THOUGHT, True, ""
        elif calls is not None and tag == calls.begin:
            self._state, self._opened = _State.HEADER, tag
        return True

    def _thought(self) -> bool:
        assert self._think is not None
        end = self._think[1]
        at = self._buffer.find(end)
        keep = 0 if at >= 0 else _possible_begin(self._buffer, [end])
        at = at if at >= 0 else len(self._buffer) - keep
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        self._reason(text)
        if not self._buffer.startswith(end):
            return False
        self._buffer = self._buffer[len(end) :]
        self._state, self._trim, self._spaces = _State.TEXT, True, ""
        return True

    def _header(self) -> bool:
        calls = self._calls
        assert calls is not None
        found = _OBJECT.match(self._buffer)
        self._object = found is not None
        if found is None and calls.header is not None:
            found = calls.header.match(self._buffer)
        if found is not None:
            name = found["name"]
            self._out.append(
                CallBegin(msgspec.json.decode(name, type=str) if self._object else name.strip())
            )
            self._buffer = self._buffer[found.end() :]
            self._said, self._json, self._state = True, JsonEnd(), _State.ARGUMENTS
            return True
        ahead = self._buffer.lstrip()
        if calls.array and ahead.startswith("["):
            self._opened += self._buffer[: len(self._buffer) - len(ahead) + 1]
            self._buffer = ahead[1:]
            return True
        if not ahead:
            return False
        if ahead.startswith("{"):
            length = JsonEnd().feed(ahead)
            if length is None:
                return False
            end = len(self._buffer) - len(ahead) + length
            whole, self._buffer = self._buffer[:end], self._buffer[end:]
            self._take_whole(whole)
            return True
        if calls.header is not None and len(ahead) < _HEADER_CHARACTERS:
            return False
        self._take_whole("")
        return True

    def _arguments(self) -> bool:
        end = self._json.feed(self._buffer)
        self._out.append(CallArguments(self._buffer[:end]))
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        self._json = JsonEnd(depth=1)
        self._state = _State.REST if self._object else _State.TAIL
        return True

    def _rest(self) -> bool:
        end = self._json.feed(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        self._state = _State.TAIL
        return True

    def _tail(self) -> bool:
        calls = self._calls
        assert calls is not None
        ahead = self._buffer.lstrip()
        tags = [*calls.ends, *([calls.again] if calls.again else [])]
        for tag in tags:
            if ahead.startswith(tag):
                self._buffer = ahead[len(tag) :]
                if tag == calls.again:
                    self._state, self._opened = _State.HEADER, tag
                return True
        if any(tag.startswith(ahead) for tag in tags):
            return False
        self._state, self._trim, self._spaces = _State.TEXT, True, ""
        return True

    # ------------------------------------------------------------ what is given

    def _take_whole(self, source: str) -> None:
        """A call whose arguments could not be given as they came, or else content."""
        call = _whole_call(source)
        self._state = _State.TAIL
        if call is None:
            self._state = _State.TEXT
            self._say(self._opened + source)
        else:
            self._said = True
            self._out += [CallBegin(call[0]), CallArguments(call[1])]

    def _say(self, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        self._trim = False
        self._said = self._said or bool(text.strip())
        self._out.append(Content(text))

    def _reason(self, text: str) -> None:
        """White space around thoughts says nothing."""
        text = self._spaces + text
        if self._trim:
            text = text.lstrip()
        whole = text.rstrip()
        self._spaces = text[len(whole) :]
        if whole:
            self._trim = False
            self._out.append(Reasoning(whole))


def _first(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the tags stands, and which it is."""
    found = [(at, tag) for tag in tags if tag and (at := text.find(tag)) >= 0]
    return min(found, default=None)


def _possible_begin(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a tag."""
    most = max(map(len, tags), default=1) - 1
    tail = text[-most:] if most else ""
    if {tag[:1] for tag in tags}.isdisjoint(tail):
        return 0
    for length in range(len(tail), 0, -1):
        end = tail[-length:]
        if any(len(tag) > length and tag.startswith(end) for tag in tags):
            return length
    return 0


class _Written(msgspec.Struct):
    """A call as models write it. The arguments stay as written: numbers are not reformatted."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def _whole_call(source: str) -> tuple[str, str] | None:
    """Name and arguments of a call's JSON; None if it is none."""
    try:
        call = msgspec.json.decode(source.strip(), type=_Written)
        arguments = (bytes(call.arguments) or bytes(call.parameters) or b"null").decode().strip()
        if arguments.startswith('"'):  # some models quote the object
            arguments = msgspec.json.decode(arguments, type=str)
    except (msgspec.DecodeError, RecursionError):
        return None
    return call.name, "{}" if arguments == "null" else arguments


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
    bare=True,
)

MISTRAL = Calls(
    begin="[TOOL_CALLS]",
    opening='[TOOL_CALLS][{"name": "',
    between='", "arguments": ',
    end="}]",
    ends=("]",),
    again=",",
    array=True,
)

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
    ends=("]",),
    again=",",
)
"""Of Mistral's newer models."""

_DEEPSEEK_TAGS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```")

DEEPSEEK = Calls(
    begin="<｜tool▁call▁begin｜>",
    opening="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    between="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    header=re.compile(
        rf"function<｜tool▁sep｜>(?P<name>[^\n]{{1,{_NAME_CHARACTERS}}})\n```json\s{{0,8}}(?=\{{)"
    ),
    ends=_DEEPSEEK_TAGS,
    noise=("<｜tool▁calls▁begin｜>",),
)
"""Of DeepSeek V3 and R1."""

DEEPSEEK_31 = Calls(
    begin="<｜tool▁call▁begin｜>",
    opening="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    between="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    header=re.compile(rf"(?P<name>[^<\n]{{1,{_NAME_CHARACTERS}}})<｜tool▁sep｜>\s{{0,8}}(?=\{{)"),
    ends=_DEEPSEEK_TAGS,
    noise=("<｜tool▁calls▁begin｜>",),
)

PLAIN = Tagged(HERMES)
"""Of text that is no answer."""
