#!/usr/bin/env bash
# smolagents 1.26.0 (`MCPClient`, with mcpadapt 0.1.19) gives each parameter of an MCP server's tool the type "string" that has none beside
# `oneOf`, `allOf`, `enum` or `const`: {"oneOf": [{"type": "integer"}, {"type": "boolean"}], "type": "string"} is what no value is, and
# so is an object in `allOf`, as OpenAPI writes it, and {"enum": [1, 2]}. A server that holds calls to their schemas refuses such a
# tool; others let the model write a text. Every parameter is required, those with a default, too, and of `anyOf` with null
# the bounds and null are gone. `anyOf` of types is a list of types, and `$ref` alone the object. Nothing is said of it.
#
# Guessed before: the schema that the MCP server shows. Found 2026-12-01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  "smolagents[mcp]==1.26.0" mcpadapt==0.1.19 mcp==1.30.0 jsonschema==4.26.0

cat >"$folder/server.py" <<'PYTHON'
import json
import sys

ROOM = {
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
}
PROPERTIES = {
    "room": {"$ref": "#/$defs/Room"},
    "all": {"allOf": [{"$ref": "#/$defs/Room"}]},
    "one": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "two": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
    "any": {},
    "numbers": {"enum": [1, 2]},
    "const": {"const": 3},
    "bounds": {"type": "integer", "minimum": 1, "maximum": 7},
    "beds": {"type": "integer"},
    "note": {"type": "string", "default": "none"},
}
TOOL = {
    "name": "book",
    "description": "Book a room.",
    "inputSchema": {
        "type": "object",
        "properties": PROPERTIES,
        "required": [name for name in PROPERTIES if name not in ("beds", "note")],
        "$defs": {"Room": ROOM},
    },
}
for line in sys.stdin:
    asked = json.loads(line)
    given = asked.get("params", {})
    if asked["method"] == "initialize":
        result = {
            "protocolVersion": given["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "hotel", "version": "1"},
        }
    elif asked["method"] == "tools/list":
        result = {"tools": [TOOL]}
    elif asked["method"] == "tools/call":
        result = {"content": [{"type": "text", "text": json.dumps(given["arguments"])}]}
    else:
        result = {}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
PYTHON

seen=$(cd "$folder" && "$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import sys

import jsonschema
from mcp import StdioServerParameters
from smolagents import MCPClient
from smolagents.models import get_tool_json_schema

VALUES = {
    "room": [{"number": 3}, "x"],
    "all": [{"number": 3}, "x"],
    "one": [3, "x"],
    "anyOf": [3, "x"],
    "two": [3, None],
    "any": [3, "x"],
    "numbers": [1, "1"],
    "const": [3, "3"],
    "bounds": [7, 85],
    "beds": [3],
    "note": ["x"],
}
with MCPClient(StdioServerParameters(command=sys.executable, args=["server.py"]), structured_output=False) as (tool,):
    sent = get_tool_json_schema(tool)["function"]["parameters"]
    print("required:", ", ".join(sent["required"]))
    for name, schema in sent["properties"].items():
        schema.pop("description", None)
        validator = jsonschema.Draft202012Validator(schema)
        said = []
        for value in VALUES[name]:
            said.append(f"{json.dumps(value)} is {'valid' if validator.is_valid(value) else 'not valid'}")
        print(f"{name}: {json.dumps(schema)}: {', '.join(said)}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
required: room, all, one, anyOf, two, any, numbers, const, bounds, beds, note
room: {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}: {"number": 3} is valid, "x" is not valid
all: {"allOf": [{"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"], "description": "see tool description"}], "type": "string"}: {"number": 3} is not valid, "x" is not valid
one: {"oneOf": [{"type": "integer"}, {"type": "boolean"}], "type": "string"}: 3 is not valid, "x" is not valid
anyOf: {"type": ["integer", "boolean"]}: 3 is valid, "x" is not valid
two: {"type": "integer", "nullable": true}: 3 is valid, null is not valid
any: {"type": "string"}: 3 is not valid, "x" is valid
numbers: {"enum": [1, 2], "type": "string"}: 1 is not valid, "1" is not valid
const: {"const": 3, "type": "string"}: 3 is not valid, "3" is not valid
bounds: {"type": "integer", "minimum": 1, "maximum": 7}: 7 is valid, 85 is not valid
beds: {"type": "integer"}: 3 is valid
note: {"type": "string", "default": "none"}: "x" is valid
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
