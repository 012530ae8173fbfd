#!/usr/bin/env bash
# llama-index-llms-openai-like 0.8.1 (core 0.14.25) asks for a pydantic model in three ways, of which one sends its schema.
# By default `structured_predict` puts the schema into the prompt, with every brace twice ({{"properties": ...), and sends
# "tool_choice": "required" without any tools, which servers refuse as OpenAI does. With `is_function_calling_model` the
# schema is a tool's; of a recursive model, which pydantic writes as {"$defs": ..., "$ref": ...}, the `$ref` is lost beside
# "additionalProperties": false, so that {} alone may be written, and a right answer is not read. With
# `should_use_structured_outputs` it is in `response_format`, whole.
#
# Guessed before: a prompt and nothing else, the schema as pydantic writes it, the same. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
    llama-index-core==0.14.25 llama-index-llms-openai==0.8.3 llama-index-llms-openai-like==0.8.1 openai==2.54.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Flat(BaseModel):
    value: int


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message, end = {"role": "assistant", "content": '{"value": 1}'}, "stop"
        for key in ("tool_choice", "response_format"):
            if key in asked:
                print(f"  {key}:", json.dumps(asked[key])[:28], flush=True)
        if '{{"' in asked["messages"][-1]["content"]:
            print("  in the prompt: {{", flush=True)
        for tool in asked.get("tools", ()):
            function = tool["function"]
            print("  tools:", sorted(function["parameters"]), flush=True)
            call = {"name": function["name"], "arguments": message["content"]}
            call = {"id": "c", "type": "function", "function": call}
            message, end = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        if "response_format" in asked:
            print("  schema:", sorted(asked["response_format"]["json_schema"]["schema"]), flush=True)
        reply = json.dumps(
            {
                "id": "x", "object": "chat.completion", "created": 0, "model": "m",
                "choices": [{"index": 0, "finish_reason": end, "message": message}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for options in ({}, {"is_function_calling_model": True}, {"should_use_structured_outputs": True}):
    model = OpenAILike(model="m", api_base=url, api_key="-", is_chat_model=True, **options)
    for kind in (Flat, Tree):
        print(*options, kind.__name__, flush=True)
        try:
            print("  read:", model.structured_predict(kind, PromptTemplate("Hi")), flush=True)
        except ValueError:
            print("  not read", flush=True)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Flat
  tool_choice: "required"
  in the prompt: {{
  read: value=1
Tree
  tool_choice: "required"
  in the prompt: {{
  read: value=1 children=[]
is_function_calling_model Flat
  tool_choice: "required"
  tools: ['additionalProperties', 'properties', 'required', 'type']
  read: value=1
is_function_calling_model Tree
  tool_choice: "required"
  tools: ['$defs', 'additionalProperties']
  not read
should_use_structured_outputs Flat
  response_format: {"type": "json_schema", "jso
  schema: ['additionalProperties', 'properties', 'required', 'title', 'type']
  read: value=1
should_use_structured_outputs Tree
  response_format: {"type": "json_schema", "jso
  schema: ['$defs', 'additionalProperties', 'properties', 'required', 'title', 'type']
  read: value=1 children=[]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
