"""Formats with each argument of a call in tags of its own.

    Qwen3-Coder                          GLM 4.5

    <tool_call>                          <tool_call>NAME
    <function=NAME>                      <arg_key>KEY</arg_key>
    <parameter=KEY>                      <arg_value>VALUE</arg_value>
    VALUE                                </tool_call>
    </parameter>
    </function>
    </tool_call>

The chat template shows where line breaks stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rootlace.runtime.server.tool_parsers.base import (
    CallArguments,
    CallBegin,
    Calls,
    JsonEnd,
    Schemas,
    possible_begin,
)
from rootlace.runtime.server.tool_parsers.tagged import (
    HEADER_CHARACTERS,
    State,
    Tagged,
    TaggedParser,
)
from rootlace.types.tagged_arguments import (
    Reading,
    escaped,
    goes_on_pattern,
    held,
    is_json,
    key_pattern,
    reading_of,
    value_of,
)
from rootlace.wire.tool_calls import Argument, Content

# Format -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaggedArguments(Tagged):
    """Format of tagged calls with arguments in the notation of `argument`."""

    argument: Argument = field(kw_only=True)

    @property
    def writes_json(self) -> bool:
        return False

    def parser(self, prompt_end: str, tools: Schemas, reasoning: bool) -> TaggedArgumentsParser:
        return TaggedArgumentsParser(
            self.argument, *self._parser_arguments(prompt_end, tools, reasoning)
        )

    def content(self, content: Content) -> Content:
        return held(self.argument, content)


# Parser -------------------------------------------------------------------------------------------


_NO_END = 1 << 30
"""More brackets than a text has: JSON within tags ends at a tag."""


class TaggedArgumentsParser(TaggedParser):
    """Parser of an answer; see `base.Parser`. Gives texts as they are written, other values when
    they are whole. Arguments that the answer ends within stay open."""

    def __init__(
        self,
        argument: Argument,
        calls: Calls | None,
        tools: Schemas,
        think: tuple[str, str] | None,
        thinking: bool,
    ) -> None:
        super().__init__(calls, tools, think, thinking)
        self._argument = argument
        self._schemas = tools
        self._key = key_pattern(argument)
        ends = calls.ends[:1] if calls is not None else ()
        self._goes_on = goes_on_pattern(argument, *ends)
        self._root: Mapping[str, Any] = {}  # the schema of the call's arguments
        self._count = 0  # of the call's arguments so far
        self._reading: Reading | None = None  # of the value that is being written
        self._plain = False  # a value that begins here ends at its first tag

    def _begin_call(self, head: str) -> bool:
        if not super()._begin_call(head):
            return False
        if not self._object:
            begun = self._out[-1]
            assert isinstance(begun, CallBegin)
            self._root = self._schemas.get(begun.name) or {}
            self._count, self._reading = 0, None
            self._give("{")
        return True

    def _arguments(self) -> bool:
        if self._object:  # JSON, as of Hermes's calls
            return super()._arguments()
        if self._reading is None:
            return self._next_argument()
        return self._text_value() if self._streams() else self._whole_value()

    def _next_argument(self) -> bool:
        self._buffer = self._buffer.lstrip()
        head, opening = self._buffer[:HEADER_CHARACTERS], self._argument.opening
        match = self._key.match(head)
        if match is not None:
            self._buffer = self._buffer[match.end() :]
            self._begin_value(match["key"])
            return True
        if opening.startswith(head):
            return False
        if head.startswith(opening) and len(head) < HEADER_CHARACTERS:
            return False
        self._give("}")
        self._state = State.TAIL
        return True

    def _begin_value(self, key: str) -> None:
        self._give(f'{", " if self._count else ""}"{escaped(key)}": ')
        self._count += 1
        self._reading = reading_of(self._root, key)
        if self._reading is Reading.JSON and self._plain:
            self._reading = Reading.ANY
        self._json, self._held = JsonEnd(_NO_END, (self._argument.close,)), []
        if self._streams():
            self._give('"')

    def _streams(self) -> bool:
        """Return whether the value is given as it is written."""
        return self._reading is Reading.TEXT and not self._argument.cdata

    def _text_value(self) -> bool:
        text, ended = self._up_to_close()
        self._give(escaped(text))
        if ended:
            self._give('"')
            self._end_value()
        return ended

    def _whole_value(self) -> bool:
        if self._reading is Reading.JSON:
            end = self._json.feed(self._buffer)
            text, self._buffer = self._buffer[:end], self._buffer[end:]
            ended = self._json.ended
        else:
            text, ended = self._up_to_close()
        self._held.append(text)
        if ended:
            self._take_value()
        return ended

    def _up_to_close(self) -> tuple[str, bool]:
        """Take a value's text so far, without the gap before its closing tag; return it, and
        whether the tag follows."""
        gap, close = self._argument.gap, self._argument.close
        at = self._buffer.find(close)
        keep = 0 if at >= 0 else possible_begin(self._buffer, (gap + close, close))
        end = at if at >= 0 else len(self._buffer) - keep
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return (text.removesuffix(gap) if at >= 0 else text), at >= 0

    def _take_value(self) -> None:
        """Give a value whose whole text has come."""
        text, self._held, again = "".join(self._held), [], ""
        if self._reading is Reading.JSON:
            if not is_json(text) and (match := self._goes_on.search(text)) is not None:
                # A quote opened no string: then a tag ends the value where the form goes on.
                text, again = text[: match.start()], text[match.start() :]
            text = text.removesuffix(self._argument.gap)
        assert self._reading is not None
        self._give(value_of(text, self._reading, self._argument))
        if again:
            self._read_again(again)
        else:
            self._end_value()

    def _read_again(self, text: str) -> None:
        """Parse text again that a value turned out not to hold: only once, to keep the work
        linear."""
        behind, plain = self._buffer, self._plain
        self._buffer, self._plain = text, True
        self._end_value()
        self._run()
        self._buffer, self._plain = self._buffer + behind, plain

    def _end_value(self) -> None:
        self._buffer = self._buffer.removeprefix(self._argument.close)
        self._reading = None

    def _close(self) -> bool:
        self._plain = True
        if self._state is not State.ARGUMENTS or self._object:
            return super()._close()
        if self._reading is Reading.JSON and self._goes_on.search("".join(self._held)):
            self._take_value()
            return True
        rest, self._buffer = self._buffer, ""
        if self._reading is None:
            opening = self._argument.opening
            if rest.startswith(opening):
                self._give(f'{", " if self._count else ""}"{escaped(rest.removeprefix(opening))}')
        elif self._streams():
            self._give(escaped(rest))
        else:
            self._give("".join([*self._held, rest]))
        return False

    def _give(self, text: str) -> None:
        if text:
            self._out.append(CallArguments(text))
