#!/usr/bin/env bash
# The ollama package 0.6.3 sends of a tool's parameters their type, items, description and enum alone: of an object its
# `properties`, `required` and `additionalProperties` are gone, of `Optional[str]` its `anyOf`, of a number its bounds,
# without a word, also where the tool is given as a dict. What is deeper in `items` stays. So a server that holds calls to
# their schemas takes any object there. `format` goes out whole. langchain-ollama 1.1.0 sends its tools through it.
#
# Guessed before: a dict is sent as it is. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check ollama==0.6.3 langchain-ollama==1.1.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import ollama
from langchain_ollama import ChatOllama

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "place": PLACE,
        "places": {"type": "array", "items": PLACE, "maxItems": 3},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": SCHEMA}}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for tool in asked["tools"]:
            sent = tool["function"]["parameters"]
            for name, schema in sent.pop("properties").items():
                print(f"  {name}: {json.dumps(schema)}", flush=True)
            print(f"  {json.dumps(sent, sort_keys=True)}", flush=True)
        if "format" in asked:
            print("  format as given:", asked["format"] == SCHEMA, flush=True)
        message = {"role": "assistant", "content": "Hello"}
        reply = {"model": "m", "created_at": "2026-01-01T00:00:00Z", "message": message, "done": True}
        reply = json.dumps({**reply, "done_reason": "stop"}).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
said = [{"role": "user", "content": "Hi"}]
client = ollama.Client(host=url)
print("ollama", flush=True)
client.chat(model="m", messages=said, tools=[TOOL])
client.chat(model="m", messages=said, format=SCHEMA)
print("langchain-ollama", flush=True)
ChatOllama(model="m", base_url=url).bind_tools([TOOL]).invoke("Hi")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
ollama
  place: {"type": "object"}
  places: {"type": "array", "items": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
  counts: {"type": "object"}
  note: {}
  days: {"type": "integer"}
  unit: {"type": "string", "enum": ["C", "F"]}
  {"required": ["place"], "type": "object"}
  format as given: True
langchain-ollama
  place: {"type": "object"}
  places: {"type": "array", "items": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
  counts: {"type": "object"}
  note: {}
  days: {"type": "integer"}
  unit: {"type": "string", "enum": ["C", "F"]}
  {"required": ["place"], "type": "object"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
