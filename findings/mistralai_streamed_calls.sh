#!/usr/bin/env bash
# mistralai 3.7.0, with `server_url` of a server that speaks OpenAI's interface, reads calls of tools whole, and not streamed
# as OpenAI streams them: a piece of the arguments, which has an index and no name, is a ResponseValidationError, since
# each piece has to have a name. One piece with the whole call is read.
#
# Guessed before: pieces are put together by their index. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check mistralai==3.7.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from mistralai.client import Mistral

NAMED = {"index": 0, "id": "c", "type": "function"}
WHOLE = {**NAMED, "function": {"name": "add", "arguments": '{"a": 1}'}}
PIECES = [
    {**NAMED, "function": {"name": "add", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"a": 1}'}},
]


class Server(BaseHTTPRequestHandler):
    calls = [WHOLE]

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        head = {"id": "x", "created": 0, "model": "m", "object": "chat.completion"}
        if asked.get("stream"):
            choices = [{"index": 0, "delta": {"tool_calls": [one]}, "finish_reason": None} for one in self.calls]
            choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
            events = [json.dumps({**head, "choices": [one]}) for one in choices]
            reply = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        else:
            message = {"role": "assistant", "content": "", "tool_calls": self.calls}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            counts = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            reply = json.dumps({**head, "choices": [choice], "usage": counts}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if asked.get("stream") else "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = Mistral(api_key="-", server_url=f"http://127.0.0.1:{server.server_port}")
said = [{"role": "user", "content": "Hi"}]
reply = client.chat.complete(model="m", messages=said)
print("whole:", reply.choices[0].message.tool_calls[0].function.arguments)
for how, Server.calls in (("in one piece", [WHOLE]), ("as OpenAI does", PIECES)):
    try:
        deltas = [one.data.choices[0].delta for one in client.chat.stream(model="m", messages=said)]
        seen = [call.function.arguments for delta in deltas for call in delta.tool_calls or ()]
    except Exception as error:
        seen = type(error).__name__
    print(f"streamed {how}:", seen)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
whole: {"a": 1}
streamed in one piece: ['{"a": 1}']
streamed as OpenAI does: ResponseValidationError
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
