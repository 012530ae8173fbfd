#!/usr/bin/env bash
# mcp 2.3.0 (`MCPServer`), the Python SDK of the Model Context Protocol, reads a text that is JSON of an object, a list or null where
# the parameter is not `str` itself: a tool `write(path: str, text: str | None)` that is called with the text of a JSON
# file gets a list and refuses it, and of the text "null" it gets None; `Any` becomes the list. The arguments are
# valid under the schema that the server shows. Lists of a result lose their nesting: [[1, 2], [3]] is the texts
# 1, 2 and 3. fastmcp 4.2.3 passes the texts as they are and sends the list as one text; an empty list is no text in both.
#
# Guessed before: texts as they are, and one text for each item of a list. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check mcp==2.3.0 fastmcp==4.2.3 pydantic==2.14.4

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import asyncio
import json
from typing import Any

import fastmcp
import mcp
from mcp.server.mcpserver import MCPServer


def write(path: str, text: str | None = None) -> str:
    return repr(text)


def keep(value: Any) -> str:
    return repr(value)


def rows(values: list) -> list:
    return values


CALLS = (
    ("write", {"path": "a", "text": "[1]"}),
    ("write", {"path": "a", "text": "null"}),
    ("write", {"path": "a", "text": "12"}),
    ("keep", {"value": "[1]"}),
    ("rows", {"values": [[1, 2], [3]]}),
    ("rows", {"values": []}),
)


async def ask(name, client):
    print(name)
    async with client:
        for tool, arguments in CALLS:
            try:
                result = await client.call_tool(tool, arguments)
            except fastmcp.exceptions.ToolError:
                read = "refused"
            else:
                refused = getattr(result, "is_error", False)
                read = "refused" if refused else [part.text for part in result.content]
            print(f"  {tool} {json.dumps(arguments)} -> {read}")


async def main():
    first, second = MCPServer("one"), fastmcp.FastMCP("two")
    for tool in (write, keep, rows):
        first.tool()(tool)
        second.tool(tool)
    await ask("mcp", mcp.Client(first))
    await ask("fastmcp", fastmcp.Client(second))


asyncio.run(main())
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
mcp
  write {"path": "a", "text": "[1]"} -> refused
  write {"path": "a", "text": "null"} -> ['None']
  write {"path": "a", "text": "12"} -> ["'12'"]
  keep {"value": "[1]"} -> ['[1]']
  rows {"values": [[1, 2], [3]]} -> ['1', '2', '3']
  rows {"values": []} -> []
fastmcp
  write {"path": "a", "text": "[1]"} -> ["'[1]'"]
  write {"path": "a", "text": "null"} -> ["'null'"]
  write {"path": "a", "text": "12"} -> ["'12'"]
  keep {"value": "[1]"} -> ["'[1]'"]
  rows {"values": [[1, 2], [3]]} -> ['[[1,2],[3]]']
  rows {"values": []} -> []
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
