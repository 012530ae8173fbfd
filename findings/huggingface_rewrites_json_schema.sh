#!/usr/bin/env bash
# huggingface_hub 2.4.0's `InferenceClient`, which documents OpenAI's form of `response_format`, does not send it:
# {"type": "json_schema", "json_schema": {"name", "schema", "strict"}} goes out as {"type": "json_object", "value": SCHEMA},
# TGI's form, whatever server `base_url` names. A server that knows OpenAI's interface alone sees `json_object`, so that
# any object is an answer, or refuses the field. Other forms, and `tools`, go out as they were given.
#
# Guessed before: what is given is sent. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check huggingface-hub==2.4.0

seen=$("$python" -W ignore - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from huggingface_hub import InferenceClient

MESSAGE = {"role": "assistant", "content": "{}"}
REPLY = {
    "id": "x", "object": "chat.completion", "created": 0, "model": "m", "system_fingerprint": "",
    "choices": [{"index": 0, "finish_reason": "stop", "message": MESSAGE}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(self.path, json.dumps(body["response_format"]), flush=True)
        reply = json.dumps(REPLY).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = InferenceClient(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-")
schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
for form in ({"type": "json_schema", "json_schema": schema}, {"type": "json_object"}):
    client.chat_completion([{"role": "user", "content": "Hi"}], model="m", response_format=form)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
/v1/chat/completions {"type": "json_object", "value": {"type": "object"}}
/v1/chat/completions {"type": "json_object"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
