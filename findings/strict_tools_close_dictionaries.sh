#!/usr/bin/env bash
# Three packages rewrite the schema of a tool so that it is "strict", and close every object in it, the dictionaries, too: of a parameter
# `dict[str, int]` the schema is {"type": "object", "additionalProperties": false}, so that a server which holds calls to their
# schemas lets the model write {} alone. crewAI 1.15.30 (`Agent`, `LLM(model="openai/...")`) and beeai-framework 0.1.85
# (`OpenAIChatModel`) do so unasked, langchain-core 1.8.3 with `strict=True`. A parameter with a default is required in each, an
# `int` without null. Of a model that holds models of its own kind, crewAI's children are such an object, {} again, and
# langchain-core's anything ({}), with `strict` or without. openai-agents 0.24.0 refuses to make a strict tool of such a function.
#
# Guessed before: a tool with a dictionary is sent as not strict, or an error. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/seen.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from pydantic import BaseModel


class Node(BaseModel):
    name: str
    children: list["Node"]


def count(counts: dict[str, int], node: Node, days: int = 3) -> str:
    """Count."""
    return ""


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        show(asked["tools"][0]["function"])
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        message = {"role": "assistant", "content": "Hello"}
        reply["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        reply["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        text = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def show(tool):
    schema = tool["parameters"]
    counts = {key: value for key, value in schema["properties"]["counts"].items() if key in ("type", "additionalProperties")}
    node = schema["properties"]["node"]
    node = schema["$defs"]["Node"] if "$ref" in node else node
    children = {key: value for key, value in node["properties"]["children"]["items"].items() if key != "title"}
    with open("seen", "a") as file:
        print("  strict", tool.get("strict"), "required", schema["required"], file=file)
        print("  counts", json.dumps(counts, sort_keys=True), file=file)
        print("  children", json.dumps(children, sort_keys=True), file=file)


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
PYTHON
cat >"$folder/crew.py" <<'PYTHON'
from crewai import LLM, Agent
from crewai.tools import tool
from seen import count, url

model = LLM(model="openai/m", base_url=url, api_key="-")
Agent(role="r", goal="g", backstory="b", llm=model, tools=[tool("count")(count)]).kickoff("Hi")
PYTHON
cat >"$folder/bee.py" <<'PYTHON'
import asyncio

import litellm

litellm.suppress_debug_info = True
from beeai_framework.adapters.openai import OpenAIChatModel
from beeai_framework.backend import UserMessage
from beeai_framework.tools import tool
from seen import count, url


async def run():
    model = OpenAIChatModel("m", base_url=url, api_key="-")
    await model.run([UserMessage("Hi")], tools=[tool(count)])


asyncio.run(run())
PYTHON
cat >"$folder/langchain_strict.py" <<'PYTHON'
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from seen import count, url

model = ChatOpenAI(model="m", base_url=url, api_key="-")
model.bind_tools([tool(count)]).invoke("Hi")
model.bind_tools([tool(count)], strict=True).invoke("Hi")
PYTHON
cat >"$folder/agents_strict.py" <<'PYTHON'
from agents import UserError, function_tool
from seen import count

try:
    function_tool(count)
except UserError as error:
    print("  refused:", str(error).split(".")[0], file=open("seen", "a"))
PYTHON

cd "$folder"
export LITELLM_LOCAL_MODEL_COST_MAP=True OTEL_SDK_DISABLED=true CREWAI_DISABLE_TELEMETRY=true CREWAI_TRACING_ENABLED=false
python3 -m venv "$folder/uv"
"$folder/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9
ask() { # name, program, packages; with uv, for crewAI installs 130 packages
  "$folder/uv/bin/uv" venv --quiet --python "$(command -v python3)" "$folder/$2-venv"
  "$folder/uv/bin/uv" pip install --quiet --python "$folder/$2-venv/bin/python" "${@:3}"
  echo "$1" >>seen
  "$folder/$2-venv/bin/python" -W ignore "$2.py" >/dev/null 2>&1
}
ask crewAI crew crewai==1.15.30 openai==2.54.0 pydantic==2.12.5
ask beeai bee beeai-framework==0.1.85 litellm==1.110.2 openai==3.57.0 pydantic==2.14.4
ask "langchain-core, without and with strict" langchain_strict \
  langchain-core==1.8.3 langchain-openai==1.7.4 openai==3.57.0 pydantic==2.14.4
ask openai-agents agents_strict openai-agents==0.24.0 pydantic==2.14.4
seen=$(cat seen)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
crewAI
  strict True required ['counts', 'node', 'days']
  counts {"additionalProperties": false, "type": "object"}
  children {"additionalProperties": false, "properties": {}, "required": [], "type": "object"}
beeai
  strict True required ['counts', 'node', 'days']
  counts {"additionalProperties": false, "type": "object"}
  children {"$ref": "#/$defs/Node"}
langchain-core, without and with strict
  strict None required ['counts', 'node']
  counts {"additionalProperties": {"type": "integer"}, "type": "object"}
  children {}
  strict True required ['counts', 'node', 'days']
  counts {"additionalProperties": false, "type": "object"}
  children {}
openai-agents
  refused: additionalProperties should not be set for object types
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
