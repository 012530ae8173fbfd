"""How a chat template lists tools and its model calls them, for programs that write both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rootlace.runtime.gateway.formats.format import Format
from rootlace.wire.errors import InvalidRequest
from rootlace.wire.protocol import Part, Text
from rootlace.wire.tool_format import FORMS, ToolFormat, write_tool

_NAME, _SYSTEM = "probe_the_name", "probe the system"


class Template(Protocol):
    """What is asked of a chat template."""

    def render(
        self, messages: Sequence[dict[str, Any]], /, tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[Part, ...]: ...


def tool_format(template: Template, form: Format) -> ToolFormat:
    """As the template lists tools behind the content of a system message; in words of our own where
    it does so elsewhere, or not at all."""
    begin, _, between = form.begin(_NAME).partition(_NAME)
    example = f'{begin}the_name{between}{{"argument": "value"}}{form.end}'
    found = ToolFormat(
        trigger=form.trigger,
        begin=begin,
        between=between,
        end=form.end,
        around=form.around,
        after=f"\nA call is written like this:\n{example}",
    )
    try:
        listing = _listing(template)
    except InvalidRequest:
        return found
    one, other = _TOOLS
    for kind in FORMS:
        before, first, rest = listing.partition(write_tool(kind, one))
        separator, second, after = rest.partition(write_tool(kind, other))
        if first and second:
            return msgspec.structs.replace(
                found, form=kind, before=before, separator=separator, after=after
            )
    return found


def _tool(name: str) -> dict[str, Any]:
    function = {
        "name": name,
        "description": f"Describe {name}.",
        "parameters": {
            "type": "object",
            "properties": {f"{name}_one": {"type": "string"}, f"{name}_two": {"type": "string"}},
        },
    }
    return {"type": "function", "function": function}


_TOOLS = [_tool("probe_a"), _tool("probe_b")]


def _listing(template: Template) -> str:
    """What stands behind the system message's content because of the tools."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "?"}]

    def behind_content(tools: Sequence[dict[str, Any]] | None) -> str:
        parts = template.render(messages, tools=tools)
        text = "".join(part.text for part in parts if isinstance(part, Text))
        return text.partition(_SYSTEM)[2]

    usual, listed = behind_content(None), behind_content(_TOOLS)
    return listed.removesuffix(usual) if usual and listed.endswith(usual) else ""
