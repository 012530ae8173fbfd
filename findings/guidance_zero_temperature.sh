#!/usr/bin/env bash
# guidance 0.3.1 (`models.OpenAI`) does not send a temperature of 0: `gen(temperature=0.0)` and `json(temperature=0)` go out
# without one, so that a server samples at its own default, of OpenAI's interface 1. 0.7 is sent, and 1e-6. And `json()` without a schema,
# which is any JSON value, asks for `json_object`, so that no list and no number can be an answer.
#
# Guessed before: 0 is sent as 0, as 0.7 is. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check guidance==0.3.1 openai==3.57.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import guidance
from guidance import assistant, gen, models, user


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        head = {"id": "x", "created": 0, "model": "m", "object": "chat.completion.chunk"}
        choices = [{"index": 0, "delta": {"content": "1"}, "finish_reason": None}]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        events = [json.dumps({**head, "choices": [one]}) for one in choices]
        reply = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for name, wanted in (
    ("gen(temperature=0.0)", gen("out", temperature=0.0)),
    ("gen(temperature=0.7)", gen("out", temperature=0.7)),
    ("gen(temperature=1e-6)", gen("out", temperature=1e-6)),
    ("json(schema, temperature=0)", guidance.json("out", schema={"type": "integer"}, temperature=0)),
    ("json()", guidance.json("out")),
):
    model = models.OpenAI("m", base_url=url, api_key="-", echo=False)
    with user():
        model += "Hi"
    with assistant():
        model += wanted
    form = server.asked.get("response_format", {}).get("type")
    print(f"{name}: temperature {server.asked.get('temperature')}, response_format {form}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
gen(temperature=0.0): temperature None, response_format None
gen(temperature=0.7): temperature 0.7, response_format None
gen(temperature=1e-6): temperature 1e-06, response_format None
json(schema, temperature=0): temperature None, response_format json_schema
json(): temperature None, response_format json_object
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
