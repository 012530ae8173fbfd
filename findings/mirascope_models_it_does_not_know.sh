#!/usr/bin/env bash
# mirascope 2.8.2 asks a server that speaks OpenAI's interface (provider "openai:completions" with a `base_url`) by the name
# of the model: of one that is not in its list of OpenAI's models, `temperature`, `top_p` and `stop_sequences` are not sent,
# as if it were a reasoning model; a line of its log says so. So a call with temperature 0 is sampled. A name with
# a slash, as models of the Hugging Face hub have, is cut: "scope/Qwen/Qwen3-8B" asks for the model "Qwen".
#
# Guessed before: all of them are sent, and the name is what follows the scope. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check mirascope==2.8.2 openai==3.57.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from mirascope import llm


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked.pop("messages")
        print(" ", json.dumps(asked, sort_keys=True), flush=True)
        message = {"role": "assistant", "content": "Hello"}
        reply = json.dumps(
            {
                "id": "x", "object": "chat.completion", "created": 0, "model": "m",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
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
llm.register_provider("openai:completions", scope="scope/", base_url=url, api_key="-")
for name in ("scope/gpt-4o", "scope/llama", "scope/Qwen/Qwen3-8B"):
    print(name, flush=True)
    llm.model(name, temperature=0, top_p=0.9, stop_sequences=["."], seed=1).call("Hi")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
scope/gpt-4o
  {"model": "gpt-4o", "seed": 1, "stop": ["."], "temperature": 0, "top_p": 0.9}
scope/llama
  {"model": "llama", "seed": 1}
scope/Qwen/Qwen3-8B
  {"model": "Qwen", "seed": 1}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
