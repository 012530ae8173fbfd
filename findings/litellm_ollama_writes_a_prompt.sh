#!/usr/bin/env bash
# litellm 1.110.2 sends a conversation with a model "ollama/NAME" to `/api/generate`, as one text that it writes itself: "### System:", "###
# User:" and "### Assistant:" before each message, whatever the model was trained with. It does not set `raw`, so that the server puts
# its own chat template around all of it, as one message of the user. Tools are printed into that text as Python writes a
# dictionary, with `format: "json"` beside them, so that no answer in words can come. "ollama_chat/NAME" sends messages and tools to
# `/api/chat`.
#
# Guessed before: messages, which Ollama's interface has. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check litellm==1.110.2 openai==3.57.0 pydantic==2.14.4
export LITELLM_LOCAL_MODEL_COST_MAP=True
seen=$(cd "$folder" && "$folder/venv/bin/python" -W ignore - 2>"$folder/log" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import litellm


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/api/show":
            print(self.path, "raw" in asked, asked.get("format"), "tools" in asked)
            print(json.dumps(asked.get("prompt", asked.get("messages"))))
        reply = {"model": "m", "response": '{"a": 1}', "message": {"role": "assistant", "content": "Hello"}, "done": True}
        text = json.dumps({**reply, "model_info": {}, "details": {}, "prompt_eval_count": 1, "eval_count": 1}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}"
messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Pay."},
]
tool = {"type": "function", "function": {"name": "pay", "parameters": {"type": "object", "properties": {"on": {"const": True}}}}}
for name in ("ollama/m", "ollama_chat/m"):
    for more in ({}, {"tools": [tool]}):
        litellm.completion(name, messages=messages, api_base=address, **more)
PYTHON
) || { cat "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
/api/generate False None False
"### System:\nBe brief.\n\n### User:\nHi\n\n### Assistant:\nHello.\n\n### User:\nPay.\n\n"
/api/generate False json False
"### System:\nBe brief. To call a function, reply with JSON ONLY in this format {\"name\": \"function_name\", \"arguments\":{\"argument_name\": \"argument_value\"}}. Once a function result answers the request, reply to the user in plain text instead of calling a function again. The following functions are available to you:\n{'type': 'function', 'function': {'name': 'pay', 'parameters': {'type': 'object', 'properties': {'on': {'const': True}}}}}\n\n\n### User:\nHi\n\n### Assistant:\nHello.\n\n### User:\nPay.\n\n"
/api/chat False None False
[{"role": "system", "content": "Be brief.", "images": []}, {"role": "user", "content": "Hi", "images": []}, {"role": "assistant", "content": "Hello.", "images": []}, {"role": "user", "content": "Pay.", "images": []}]
/api/chat False None True
[{"role": "system", "content": "Be brief.", "images": []}, {"role": "user", "content": "Hi", "images": []}, {"role": "assistant", "content": "Hello.", "images": []}, {"role": "user", "content": "Pay.", "images": []}]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
