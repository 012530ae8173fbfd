#!/usr/bin/env bash
# evalscope 1.14.1 (`evalscope perf --stream`): of a stream whose pieces have several tokens each, as servers send them that gather tokens for a
# while, it tells an acceptance rate of drafts, "Spec. Accept Rate", though nobody drafted: of 12
# tokens in 6 pieces 45.5 %, in 3 pieces 72.7 %. Of the same tokens one by one it tells none.
#
# Guessed before: no such figure without a server that tells one. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "evalscope[perf]==1.14.1"
cat >"$folder/serve.py" <<'PYTHON'
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HEAD = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
USAGE = {"prompt_tokens": 7, "completion_tokens": 12, "total_tokens": 19}
WORDS = ["one "] * 12


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        together = int(self.path.split("/")[1])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for at in range(0, len(WORDS), together):
            time.sleep(0.02)
            delta = {"role": "assistant", "content": "".join(WORDS[at : at + together])}
            self.say({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self.say({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.say({"choices": [], "usage": USAGE})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, given):
        self.wfile.write(f"data: {json.dumps({**HEAD, **given})}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
print(server.server_port, flush=True)
server.serve_forever()
PYTHON

"$folder/venv/bin/python" "$folder/serve.py" >"$folder/port" &
server=$!
trap 'kill $server; rm -rf "$folder"' EXIT
until [ -s "$folder/port" ]; do sleep 0.1; done
seen=$(for together in 1 2 4; do
    echo "$together tokens in a piece:"
    (cd "$folder" && venv/bin/evalscope perf --url "http://127.0.0.1:$(cat port)/$together/v1/chat/completions" \
        --model m --api openai --number 2 --parallel 1 --prompt Hi --stream 2>/dev/null) |
        grep -oE "(Output Tokens|Decoded Tok/Iter|Spec. Accept Rate) +│ +[0-9.%]+" | sed 's/ *│ */: /; s/^/  /' || true
done)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
1 tokens in a piece:
  Output Tokens: 12
2 tokens in a piece:
  Output Tokens: 12
  Decoded Tok/Iter: 1.83
  Spec. Accept Rate: 45.5%
4 tokens in a piece:
  Output Tokens: 12
  Decoded Tok/Iter: 3.67
  Spec. Accept Rate: 72.7%
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
