"""Formats with calls in the text behind a tag."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import msgspec

from rootlace.runtime.server.tool_parsers.base import (
    CallArguments,
    CallBegin,
    Calls,
    Content,
    Delta,
    Format,
    JsonEnd,
    Reasoning,
    Schemas,
    first_tag,
    pieces,
    possible_begin,
)
from rootlace.wire.protocol import Thoughts

# Longest header, and longest text around arguments; longer ones are text. This bounds the work
# repeated for every new piece.
HEADER_CHARACTERS = 512
OBJECT = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)


FENCE = "```"
_UNTAGGED = re.compile(rf"(?:{FENCE}(?:json)?\s{{0,8}})?(?=\{{)")
_MAY_BE_UNTAGGED = re.compile(rf"`{{1,2}}|{FENCE}(?:j|js|jso|(?:json)?\s{{0,8}})")
"""An object without a tag, perhaps in a fence of Markdown; the beginning of such text."""
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
"""First keys of objects that may be calls; other JSON streams at once."""


@dataclass(frozen=True)
class Tagged(Format):
    """Format of tagged calls and thoughts; `think` holds the tags around thoughts."""

    think: tuple[str, str] | None = None

    @cached_property
    def always(self) -> bool:
        return self.think is not None

    def parser(self, prompt_end: str, tools: Schemas, reasoning: bool) -> TaggedParser:
        return TaggedParser(*self._parser_arguments(prompt_end, tools, reasoning))

    def _parser_arguments(
        self, prompt_end: str, tools: Schemas, reasoning: bool
    ) -> tuple[Calls | None, Schemas, tuple[str, str] | None, bool]:
        """Return the arguments of a parser."""
        think = self.think if reasoning else None
        thinking = think is not None and prompt_end.rstrip().endswith(think[0])
        return self.calls if tools else None, tools, think, thinking

    def leave_thoughts(self, prompt_end: str) -> str:
        if self.think is None or not prompt_end.rstrip().endswith(self.think[0]):
            return ""
        return f"\n{self.think[1]}\n\n"

    def thoughts(self, prompt_end: str) -> Thoughts | None:
        before = prompt_end.rstrip()
        if self.think is None or before.endswith(self.think[1]):
            return None
        begin, end = self.think
        begun = before.endswith(begin)
        return Thoughts(end, "" if begun else begin, gap="\n\n", close=f"\n{end}")

    def no_thoughts(self) -> str:
        return "" if self.think is None else f"{self.think[0]}\n\n{self.think[1]}\n\n"


class State(Enum):
    """State of a parser."""

    TEXT = auto()
    THOUGHT = auto()
    HEADER = auto()  # behind the tag of a call, before its arguments
    WHOLE = auto()  # in a call's object that is read when it is complete
    ARGUMENTS = auto()
    REST = auto()  # behind the arguments, before the end of the object they stand in
    TAIL = auto()  # behind a call


class TaggedParser:
    """Parser of an answer; see `base.Parser`. Gives a call while it is written."""

    def __init__(
        self,
        calls: Calls | None,
        tools: Collection[str] = (),
        think: tuple[str, str] | None = None,
        thinking: bool = False,
    ) -> None:
        self._calls = calls
        self._tools = tools
        self._think = think
        self._buffer = ""
        self._out: list[Delta] = []
        self._state = State.THOUGHT if thinking else State.TEXT
        self._answering = False  # the answer has begun: thoughts come before it
        self._said = False  # there is text for the user
        self._spaces: list[str] = []  # white space, dropped unless thoughts follow
        self._trim = thinking  # white space before the next text says nothing
        self._opened = ""  # text before a supposed call's object
        self._tagged = False  # a tag says that a call follows; else it must name an offered tool
        self._array = False  # within an array of calls
        self._json = JsonEnd()
        self._object = False  # the arguments stand in an object
        self._held: list[str] = []  # pieces of an object that is parsed as a whole
        self._closers: list[str] = []  # tags that may still follow the last call
        self._steps: dict[State, Callable[[], bool]] = {
            State.TEXT: self._text,
            State.THOUGHT: self._thought,
            State.HEADER: self._header,
            State.WHOLE: self._whole,
            State.ARGUMENTS: self._arguments,
            State.REST: self._rest,
            State.TAIL: self._tail,
        }

    def feed(self, text: str) -> list[Delta]:
        for piece in pieces(text):
            self._buffer += piece
            self._run()
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Delta]:
        while self._close():
            self._run()
        out, self._out = self._out, []
        return out

    def _run(self) -> None:
        while self._buffer and self._steps[self._state]():
            pass

    def _close(self) -> bool:
        """Decide about text that waits for more; return whether some of it must be read again."""
        rest = self._buffer
        if self._state is State.HEADER and not rest.lstrip().startswith("{"):
            self._take_whole("")
            return True
        if self._state is State.TAIL or (self._state is State.REST and not _is_rest(rest, "}")):
            self._leave_call()
            return True
        self._buffer = ""
        if self._state is State.TEXT:
            self._say(rest)
        elif self._state is State.THOUGHT:
            self._reason(rest)
        elif self._state is State.ARGUMENTS:
            self._out.append(CallArguments(rest))
        elif self._state in (State.HEADER, State.WHOLE):
            self._take_whole("".join([*self._held, rest]))
        return False

    # ------------------------------------------------------------ one step per state; True: go on

    def _text(self) -> bool:
        calls, tags = self._calls, []
        if self._think is not None and not self._answering:
            tags.append(self._think[0])
        if calls is not None:
            if not self._said and (calls.bare or calls.header is None):
                # Models that have learnt tags write calls as Markdown, too (Qwen2.5-Coder does).
                ahead = self._buffer.lstrip()
                self._say(self._buffer[: len(self._buffer) - len(ahead)])
                self._buffer = ahead
                if (match := _UNTAGGED.match(ahead)) is not None:
                    self._state, self._opened, self._tagged = State.HEADER, match[0], False
                    self._buffer = ahead[match.end() :]
                    return True
                if _MAY_BE_UNTAGGED.fullmatch(ahead):
                    return False
            tags += [calls.begin, *calls.noise]
        found = first_tag(self._buffer, tags)
        if found is None:
            keep = possible_begin(self._buffer, tags)
            text = self._buffer[: len(self._buffer) - keep]
            self._buffer = self._buffer[len(text) :]
            self._say(text)
            return False
        at, tag = found
        self._say(self._buffer[:at])
        self._buffer = self._buffer[at + len(tag) :]
        if self._think is not None and tag == self._think[0]:
            if self._answering:
                self._say(tag)
            else:
                self._state, self._trim, self._spaces = State.THOUGHT, True, []
        elif calls is not None and tag == calls.begin:
            self._state, self._opened = State.HEADER, tag
            self._tagged, self._array = True, False
        else:
            self._trim = True
        return True

    def _thought(self) -> bool:
        assert self._think is not None
        end = self._think[1]
        at = self._buffer.find(end)
        keep = 0 if at >= 0 else possible_begin(self._buffer, [end])
        at = at if at >= 0 else len(self._buffer) - keep
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        self._reason(text)
        if not self._buffer.startswith(end):
            return False
        self._buffer = self._buffer[len(end) :]
        self._state, self._trim = State.TEXT, True
        return True

    def _header(self) -> bool:
        calls = self._calls
        assert calls is not None
        head = self._buffer[:HEADER_CHARACTERS]
        if self._begin_call(head):
            return True
        if not self._tagged and (first := _FIRST_KEY.match(head)) and first[1] not in _KEYS:
            self._state, self._buffer = State.TEXT, self._buffer[first.end() :]
            self._say(self._opened + first[0])
            return True
        ahead = head.lstrip()
        full = len(head) == HEADER_CHARACTERS
        if calls.array and not self._array and ahead.startswith("["):
            self._array = True
            self._opened += head[: len(head) - len(ahead) + 1]
            self._buffer = self._buffer[len(head) - len(ahead) + 1 :]
            return True
        if ahead.startswith("{"):
            json = JsonEnd(stops=calls.stops)
            json.feed(head)
            if not (full or json.ended):
                return False
            self._state, self._json = State.WHOLE, JsonEnd(stops=calls.stops)
            return True
        if not full and (calls.header is not None or not ahead):
            return False
        self._take_whole("")
        return True

    def _begin_call(self, head: str) -> bool:
        """Begin a call if its name is known and its arguments follow; return whether so."""
        calls = self._calls
        assert calls is not None
        match, named = OBJECT.match(head), True
        if match is None and calls.header is not None:
            match, named = calls.header.match(head), False
        if match is None:
            return False
        name: str | None = _string(match["name"]) if named else match["name"].strip()
        is_object = "{" in match[0]
        if name is None or not (self._tagged or name in self._tools):
            return False
        self._out.append(CallBegin(name))
        self._buffer = self._buffer[match.end() :]
        self._answering, self._json = True, JsonEnd(stops=calls.stops)
        self._state = State.ARGUMENTS
        self._closers = [*([] if is_object else [calls.fence]), *self._ends(calls)]
        self._object = is_object
        return True

    def _whole(self) -> bool:
        end = self._json.feed(self._buffer)
        self._held.append(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not self._json.ended:
            return False
        self._take_whole("".join(self._held))
        return True

    def _arguments(self) -> bool:
        end = self._json.feed(self._buffer)
        if end:
            self._out.append(CallArguments(self._buffer[:end]))
        self._buffer = self._buffer[end:]
        if not self._json.ended:
            return False
        self._state = State.REST if self._object and self._json.closed else State.TAIL
        return True

    def _rest(self) -> bool:
        """Skip further members of a call's object, which have no meaning."""
        calls = self._calls
        assert calls is not None
        self._buffer = self._buffer.lstrip()
        head = self._buffer[:HEADER_CHARACTERS]
        if not head:
            return False
        json = JsonEnd(depth=1, stops=calls.stops)
        end = json.feed(head) if head[0] in "}," else 0
        if head[0] in "}," and not json.ended and len(head) < HEADER_CHARACTERS:
            return False
        if json.ended and _is_rest(head[:end], "" if json.closed else "}"):
            self._buffer = self._buffer[end:]
        self._state = State.TAIL
        return True

    def _tail(self) -> bool:
        calls = self._calls
        assert calls is not None
        self._buffer = self._buffer.lstrip()
        closers = [tag for tag in self._closers if tag] + (["]"] if self._array else [])
        for tag in closers:
            if self._buffer.startswith(tag):
                self._buffer = self._buffer[len(tag) :]
                if tag == "]" and self._array:
                    self._array = False
                else:
                    self._closers = self._closers[self._closers.index(tag) + 1 :]
                return True
        if calls.again and self._buffer.startswith(calls.again):
            self._buffer = self._buffer[len(calls.again) :]
            self._state, self._opened, self._tagged = State.HEADER, calls.again, self._array
            return True
        if any(tag.startswith(self._buffer) for tag in closers):
            return False
        self._leave_call()
        return True

    def _ends(self, calls: Calls) -> list[str]:
        """Return the tags that may stand behind a call's object."""
        return [*([FENCE] if self._opened.startswith(FENCE) else []), *calls.ends]

    # ------------------------------------------------------------ output

    def _leave_call(self) -> None:
        self._state, self._trim = State.TEXT, True

    def _take_whole(self, source: str) -> None:
        """Give a call whose arguments could not be given as they came, or else content."""
        calls = self._calls
        assert calls is not None
        call, self._held = _whole_call(source), []
        if call is not None:
            offered = call.name in self._tools
            if (offered or self._tagged) if call.has_arguments else (offered and self._tagged):
                self._answering, self._closers = True, self._ends(calls)
                self._out += [CallBegin(call.name), CallArguments(call.arguments)]
                self._state = State.TAIL
                return
        self._state = State.TEXT
        self._say(self._opened + source)

    def _say(self, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        if not text:
            return
        self._trim = False
        self._said = self._said or bool(text.strip())
        self._answering = self._answering or self._said
        self._out.append(Content(text))

    def _reason(self, text: str) -> None:
        """Give thoughts without white space around them."""
        if self._trim:
            text = text.lstrip()
        whole = text.rstrip()
        if whole:
            self._trim = False
            self._out.append(Reasoning("".join([*self._spaces, whole])))
            self._spaces = []
        self._spaces.append(text[len(whole) :])


def _string(source: str) -> str | None:
    try:
        return msgspec.json.decode(source, type=str)
    except msgspec.DecodeError:
        return None


def _is_rest(source: str, end: str) -> bool:
    """Return whether an object may go on with `source` behind its arguments."""
    try:
        msgspec.json.decode(f'{{"":0{source}{end}')
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


class _Written(msgspec.Struct):
    """Call as models write it. The arguments stay as written: numbers are not reformatted."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _Whole(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    has_arguments: bool


def _whole_call(source: str) -> _Whole | None:
    """Return the call in an object's JSON; None if it is none."""
    try:
        call = msgspec.json.decode(source.strip(), type=_Written)
        sent = bytes(call.arguments) or bytes(call.parameters)
        arguments = (sent or b"null").decode().strip()
        if arguments.startswith('"'):  # some models quote the object
            arguments = msgspec.json.decode(arguments, type=str)
    except (msgspec.DecodeError, RecursionError):
        return None
    return _Whole(call.name, "{}" if arguments == "null" else arguments, bool(sent))
