"""Tools of an MCP server (`pip install rootlace[mcp]`), through the client of the `mcp` package."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rootlace.language.tools import Tool, Tools, tools
from rootlace.wire.errors import InvalidRequest, RootlaceError


class ToolFailed(RootlaceError):
    """The server says that a call failed; the message is what it says."""

    code = "tool_failed"
    http_status = 422


async def mcp_tools(client: Any) -> Tools:
    """The tools of the server behind an `mcp.Client` that is connected, for `gen(tools=...)`.

    They are called on the loop that runs here, which has to go on while programs use them: in
    `async def` programs it does, ordinary ones are to be run in a thread.
    """
    loop = asyncio.get_running_loop()
    found: list[Tool] = []
    cursor = None
    while cursor is not None or not found:
        page = _plain(await client.list_tools(cursor=cursor))
        found += [_tool(client, loop, described) for described in page["tools"]]
        cursor = page.get("nextCursor")
        if not found and cursor is None:
            raise InvalidRequest("the MCP server has no tools")
    return tools(*found)


def _plain(answer: Any) -> dict[str, Any]:
    """A message of the protocol as JSON has it."""
    plain: dict[str, Any] = answer.model_dump(by_alias=True, mode="json")
    return plain


def _tool(client: Any, loop: asyncio.AbstractEventLoop, described: dict[str, Any]) -> Tool:
    name: str = described["name"]

    async def ask(text: str) -> str:
        result = _plain(await client.call_tool(name, json.loads(text)))
        said = "\n".join(part.get("text", f"[{part['type']}]") for part in result["content"])
        if result.get("isError"):
            raise ToolFailed(said)
        return said

    async def call(text: str) -> str:
        if asyncio.get_running_loop() is loop:
            return await ask(text)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ask(text), loop))

    about = " ".join((described.get("description") or "").split())
    return Tool(name, about, described["inputSchema"], call, is_async=True)
