#!/usr/bin/env bash
# strands-agents 1.62.0's `LlamaCppModel` loses the whole answer of a server that streams as OpenAI does: it asks for
# `stream_options.include_usage`, with which every chunk has `"usage": null` but the last (OpenAI's reference), and it passes
# over whatever chunk has the key. llama.cpp's server has it in the last chunk alone. There is no error: the
# answer is empty, a call is none, and the tokens are counted. `OpenAIModel` of the same package reads both.
#
# Guessed before: a null is no usage. Found 2026-11-29.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check strands-agents==1.62.0 openai==2.54.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from strands import Agent
from strands.models.llamacpp import LlamaCppModel
from strands.models.openai import OpenAIModel

COUNTS = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


class Server(BaseHTTPRequestHandler):
    nulls = {}

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        for delta, end in (({"role": "assistant", "content": "Hello"}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": end}
            self.send({**head, **self.nulls, "choices": [choice]})
        self.send({**head, "choices": [], "usage": COUNTS})
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, chunk):
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
for Server.nulls in ({}, {"usage": None}):
    for model in (
        OpenAIModel(client_args={"base_url": f"{url}/v1", "api_key": "-"}, model_id="m"),
        LlamaCppModel(base_url=url, model_id="m"),
    ):
        result = Agent(model=model, callback_handler=None)("Hi")
        tokens = result.metrics.accumulated_usage["outputTokens"]
        print(json.dumps(Server.nulls), type(model).__name__, repr(str(result).strip()), tokens, "tokens")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{} OpenAIModel 'Hello' 2 tokens
{} LlamaCppModel 'Hello' 2 tokens
{"usage": null} OpenAIModel 'Hello' 2 tokens
{"usage": null} LlamaCppModel '' 2 tokens
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
