#!/usr/bin/env bash
# dspy 3.4.1 (`JSONAdapter`, litellm 1.110.2) asks a server for a schema by the name of its model: of "openai/gpt-4o" it
# sends `response_format` with the schema of the signature, of the same server's "openai/m" or "hosted_vllm/m" nothing,
# not even `json_object`, since litellm's list of models does not have the name. Of "lm_studio/m" it sends the schema. A
# dictionary among the outputs makes a schema `json_object`, whatever the name.
#
# Guessed before: the schema, whatever the name. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check dspy==3.4.1 litellm==1.110.2 openai==3.57.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import dspy


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": json.dumps({"sum": 1, "counts": {}})}
        reply = {
            "id": "x", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        reply = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


class Add(dspy.Signature):
    """Add."""

    question: str = dspy.InputField()
    sum: int = dspy.OutputField()


class Count(Add):
    """Count."""

    counts: dict[str, int] = dspy.OutputField()


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for name in ("openai/gpt-4o", "openai/m", "hosted_vllm/m", "lm_studio/m"):
    sent = []
    for signature in (Add, Count):
        model = dspy.LM(name, api_base=url, api_key="-", cache=False)
        with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
            dspy.Predict(signature)(question="Hi")
        sent.append((server.asked.get("response_format") or {}).get("type"))
    print(name, *sent)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
openai/gpt-4o json_schema json_object
openai/m None None
hosted_vllm/m None None
lm_studio/m json_schema json_object
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
