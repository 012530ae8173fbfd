#!/usr/bin/env bash
# agno 3.1.10 rewrites the schema of an answer (`output_schema`) where it has dictionaries, and sends it as strict: a field
# `dict[str, Any]` or `dict` goes out as {"type": "object", "additionalProperties": false} without properties, so that {} is
# all that a server which holds the schema can write; a field `dict[str, int]`, which the model requires, is the only
# one that is not `required`, while fields with a default are. An answer without it comes back as a text. `Ollama` of
# the same package sends the schema as it is.
#
# Guessed before: any object for the first, and all fields required. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check agno==3.1.10 openai==3.57.0 ollama==0.6.3

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from agno.agent import Agent
from agno.models.ollama import Ollama
from agno.models.openai.like import OpenAILike
from pydantic import BaseModel


class Report(BaseModel):
    name: str
    counts: dict[str, int]
    details: dict[str, Any]
    note: str = ""


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = json.dumps({"name": "n", "details": {}, "note": ""})
        message = {"role": "assistant", "content": text}
        if "format" in asked:
            schema = asked["format"]
            reply = {"model": "m", "created_at": "2026-01-01T00:00:00Z", "message": message, "done": True}
        else:
            schema = asked["response_format"]["json_schema"]["schema"]
            reply = {
                "id": "x", "object": "chat.completion", "created": 0, "model": "m",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            }
        print("  required", schema["required"], flush=True)
        for field in ("counts", "details"):
            print(" ", field, json.dumps(schema["properties"][field].get("additionalProperties")), flush=True)
        reply = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


logging.disable()
server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
for model in (OpenAILike(id="m", base_url=f"{url}/v1", api_key="-"), Ollama(id="m", host=url)):
    print(type(model).__name__, flush=True)
    run = Agent(model=model, output_schema=Report, telemetry=False).run("Hi")
    print("  answered", type(run.content).__name__, run.status.value, flush=True)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
OpenAILike
  required ['name', 'details', 'note']
  counts {"type": "integer"}
  details false
  answered str COMPLETED
Ollama
  required ['name', 'counts', 'details']
  counts {"type": "integer"}
  details true
  answered str COMPLETED
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
