#!/usr/bin/env bash
# mcpadapt 0.1.19, by which crewAI 1.15.30 gets the tools of MCP servers (`MCPServerAdapter` of crewai-tools is made of it), gives each
# parameter `"anyOf": [], "enum": null, "items": null, "properties": {}`, and crewAI sends it so, with `strict: true`: that is no schema in
# any draft (jsonschema 4.26.0), so that a server which holds calls to their schemas refuses each such tool, be it of one integer. Where
# somebody passes over these keywords, the bounds of a parameter are gone, and of one with a default its type, too. A parameter that
# may be null has an `anyOf` of its own. crewAI's own reader (`Agent(mcps=[MCPServerStdio(...)])`) sends schemas, bounds included.
#
# Guessed before: the schema that the MCP server shows. Found 2026-12-01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
  mcpadapt==0.1.19 crewai==1.15.30 mcp==1.30.0 openai==2.54.0 pydantic==2.12.5 jsonschema==4.26.0

cat >"$folder/server.py" <<'PYTHON'
from typing import Annotated

from mcp.server.fastmcp import FastMCP
from pydantic import Field

server = FastMCP("hotel")


@server.tool()
def book(days: Annotated[int, Field(ge=1, le=7)], beds: int = 2, note: str | None = None) -> str:
    """Book a room."""
    return f"{days} days"


server.run()
PYTHON

export CREWAI_DISABLE_TELEMETRY=true OTEL_SDK_DISABLED=true CREWAI_TRACING_ENABLED=false HOME="$folder"
(cd "$folder" && "$python" -W ignore - >"$folder/log" 2>&1) <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jsonschema
from crewai import LLM, Agent
from crewai.mcp import MCPServerStdio
from mcp import StdioServerParameters
from mcpadapt.core import MCPAdapt
from mcpadapt.crewai_adapter import CrewAIAdapter

MESSAGE = {"role": "assistant", "content": "done"}
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
asked = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def say(line):
    with open("seen", "a") as file:
        print(line, file=file)


def show(name, **given):
    llm = LLM(model="openai/m", base_url=url, api_key="-")
    Agent(role="r", goal="g", backstory="b", llm=llm, **given).kickoff("Book a room.")
    function = asked[-1]["tools"][0]["function"]
    parameters = function["parameters"]
    say(f"{name}: strict {json.dumps(function['strict'])}, required {parameters['required']}")
    for key, schema in parameters["properties"].items():
        schema.pop("description", None)
        say(f"  {key}: {json.dumps(schema, sort_keys=True)}")
    for draft in (jsonschema.Draft7Validator, jsonschema.Draft202012Validator):
        try:
            draft.check_schema(parameters)
            say(f"  {draft.__name__}: a schema")
        except jsonschema.SchemaError:
            say(f"  {draft.__name__}: no schema")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
with MCPAdapt(StdioServerParameters(command=sys.executable, args=["server.py"]), CrewAIAdapter()) as tools:
    show("mcpadapt", tools=tools)
show("crewAI", mcps=[MCPServerStdio(command=sys.executable, args=["server.py"])])
PYTHON
seen=$(cat "$folder/seen")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
mcpadapt: strict true, required ['days', 'beds', 'note']
  days: {"anyOf": [], "enum": null, "items": null, "properties": {}, "type": "integer"}
  beds: {"anyOf": [], "enum": null, "items": null, "properties": {}}
  note: {"anyOf": [{"type": "string"}, {"type": "null"}], "enum": null, "items": null, "properties": {}}
  Draft7Validator: no schema
  Draft202012Validator: no schema
crewAI: strict true, required ['days', 'beds', 'note']
  days: {"maximum": 7, "minimum": 1, "type": "integer"}
  beds: {"anyOf": [{"type": "integer"}, {"type": "null"}]}
  note: {"anyOf": [{"type": "string"}, {"type": "null"}]}
  Draft7Validator: a schema
  Draft202012Validator: a schema
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
