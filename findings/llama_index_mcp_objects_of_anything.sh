#!/usr/bin/env bash
# llama-index-tools-mcp 0.6.0 makes pydantic models of the schemas that an MCP server shows and sends (`to_openai_tool`) what these say: an
# object that stands where it is used, as zod writes all of them, is any object, without its fields; `oneOf`, `allOf` and a
# parameter of any kind are texts; constants, bounds and patterns are gone, and a tuple is any list. So the model is not told
# what is in the object, and has to write "3" for 3. A parameter that may be left out may be null, which goes on to the server. An
# object in `$defs`, as pydantic writes all of them, keeps its fields, and `enum` and `anyOf` are kept. Nothing is said of it.
#
# Guessed before: the schema that the server shows. Found 2026-12-01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  llama-index-tools-mcp==0.6.0 llama-index-core==0.14.25 mcp==2.3.0 pydantic==2.14.4 jsonschema==4.26.0

cat >"$folder/server.py" <<'PYTHON'
import json
import sys

ROOM = {
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
}
PROPERTIES = {
    "inline": ROOM,
    "reference": {"$ref": "#/$defs/Room"},
    "all": {"allOf": [{"$ref": "#/$defs/Room"}]},
    "one": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "any": {},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "enum": {"type": "string", "enum": ["desk", "room"]},
    "const": {"type": "string", "const": "desk"},
    "bounds": {"type": "integer", "minimum": 1, "maximum": 7},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}$"},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    "optional": {"type": "integer"},
}
TOOL = {
    "name": "book",
    "description": "Book a room.",
    "inputSchema": {
        "type": "object",
        "properties": PROPERTIES,
        "required": [name for name in PROPERTIES if name != "optional"],
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
import asyncio
import json
import sys

import jsonschema
from llama_index.tools.mcp import BasicMCPClient, McpToolSpec

RIGHT = {
    "inline": {"number": 3},
    "reference": {"number": 3},
    "all": {"number": 3},
    "one": 3,
    "any": 3,
    "anyOf": 3,
    "enum": "desk",
    "const": "desk",
    "bounds": 7,
    "pattern": "AB",
    "tuple": [1, "a"],
    "optional": 3,
}
WRONG = {
    "inline": {"floor": "x"},
    "reference": {"floor": "x"},
    "all": "x",
    "one": "x",
    "anyOf": "x",
    "enum": "x",
    "const": "x",
    "bounds": 85,
    "pattern": "x",
    "tuple": ["a", 1],
    "optional": None,
}


async def main():
    client = BasicMCPClient(sys.executable, args=["server.py"])
    (tool,) = await McpToolSpec(client=client).to_tool_list_async()
    sent = tool.metadata.to_openai_tool()["function"]["parameters"]
    print("required:", sent["required"])
    for name, schema in sent["properties"].items():
        shown = {key: value for key, value in schema.items() if key not in ("title", "description", "default")}
        whole = {**schema, "$defs": sent["$defs"]}
        validator = jsonschema.Draft202012Validator(whole)
        said = []
        for value in [case[name] for case in (RIGHT, WRONG) if name in case]:
            said.append(f"{json.dumps(value)} is {'valid' if validator.is_valid(value) else 'not valid'}")
        print(f"{name}: {json.dumps(shown)}: {', '.join(said)}")
    output = await tool.acall(**{**RIGHT, "optional": None})
    called = json.loads(output.raw_output.content[0].text)
    print("called with optional", json.dumps(called.get("optional", "left out")))


asyncio.run(main())
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
required: ['inline', 'reference', 'all', 'one', 'any', 'anyOf', 'enum', 'const', 'bounds', 'pattern', 'tuple']
inline: {"additionalProperties": true, "type": "object"}: {"number": 3} is valid, {"floor": "x"} is valid
reference: {"$ref": "#/$defs/Room"}: {"number": 3} is valid, {"floor": "x"} is not valid
all: {"type": "string"}: {"number": 3} is not valid, "x" is valid
one: {"type": "string"}: 3 is not valid, "x" is valid
any: {"type": "string"}: 3 is not valid
anyOf: {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}: 3 is valid, "x" is not valid
enum: {"enum": ["desk", "room"], "type": "string"}: "desk" is valid, "x" is not valid
const: {"type": "string"}: "desk" is valid, "x" is valid
bounds: {"type": "integer"}: 7 is valid, 85 is valid
pattern: {"type": "string"}: "AB" is valid, "x" is valid
tuple: {"items": {}, "type": "array"}: [1, "a"] is valid, ["a", 1] is valid
optional: {"anyOf": [{"type": "integer"}, {"type": "null"}]}: 3 is valid, null is valid
called with optional null
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
