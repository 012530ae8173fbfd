"""How models write calls that stand in the text behind a tag."""

from __future__ import annotations

import re

import msgspec

from rootlace.wire.tool_calls import LINES, Around

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
