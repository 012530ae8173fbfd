"""Which format a chat template shows its model to have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rootlace.runtime.gateway.formats.calls import (
    DEEPSEEK,
    DEEPSEEK_31,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_BLANK,
    Calls,
)
from rootlace.runtime.gateway.formats.format import Format
from rootlace.runtime.gateway.formats.harmony import Harmony
from rootlace.runtime.gateway.formats.tagged import Tagged
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Part, Text

_PROBE_NAME, _PROBE_KEY = "probe_the_name", "probe_the_arguments"
_TAG = re.escape(HERMES.begin)
_PROBE = re.compile(
    rf"(?P<opening>{_TAG}(?:(?!{_TAG}).)*?){_PROBE_NAME}(?P<between>.*?)"
    rf'\{{\s*"{_PROBE_KEY}"\s*:\s*1\s*\}}(?P<end>.*?{re.escape(HERMES.ends[0])})',
    re.DOTALL,
)
_THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


class Template(Protocol):
    """What is asked of a chat template. `source` is None where the model has none."""

    source: str | None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        /,
        tools: None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[Part, ...]: ...


def format_of(template: Template) -> Format:
    """The format that the template writes earlier answers in; Hermes's if it shows none."""
    source = template.source or ""
    if "<|channel|>" in source and "<|message|>" in source:
        return Harmony()
    think = next((tags for tags in _THINK if tags[1] in source), None)
    return Tagged(_calls(template, source), think)


def _calls(template: Template, source: str) -> Calls:
    if "<｜tool▁call▁begin｜>" in source:
        return DEEPSEEK if "```json" in source else DEEPSEEK_31
    if "[TOOL_CALLS]" in source:
        if "[ARGS]" in source:
            return MISTRAL_ARGS
        return MISTRAL_BLANK if "[TOOL_CALLS] [" in source else MISTRAL
    if HERMES.begin not in source and ("<|python_tag|>" in source or "ipython" in source):
        return LLAMA3
    return _as_written(template)


def _as_written(template: Template) -> Calls:
    """Hermes's calls, with the white space that the template has around a call's name."""
    function = {"name": _PROBE_NAME, "arguments": {_PROBE_KEY: 1}}
    call = {"id": "call_0", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        parts = template.render(messages, add_generation_prompt=False)
    except InvalidRequest:
        return HERMES
    found = _PROBE.search("".join(part.text for part in parts if isinstance(part, Text)))
    return msgspec.structs.replace(HERMES, **found.groupdict()) if found else HERMES
