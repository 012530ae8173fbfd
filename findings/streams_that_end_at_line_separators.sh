#!/usr/bin/env bash
# ollama 0.6.3 and huggingface_hub 2.4.0 (`InferenceClient`) fail where a streamed answer holds U+2028, U+2029 or U+0085: characters
# of texts, which JSON may hold as they are (RFC 8259, section 7), and which Ollama's and most servers' JSON does hold. Both read
# lines by httpx's `iter_lines`, which ends a line wherever `str.splitlines` does, and read half a line as JSON. What came
# before is lost with the error. The same answer whole is read, and so are the escapes \u2028. openai 3.57.0 reads it. So
# do langchain-ollama 1.1.0 and llama-index-llms-ollama 0.11.0, which stream through the first.
#
# Guessed before: a line ends at its line feed, as lines of JSON and server-sent events do. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  ollama==0.6.3 huggingface_hub==2.4.0 openai==3.57.0 httpx==0.28.1
seen=$("$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from huggingface_hub import InferenceClient
from ollama import Client
from openai import OpenAI

SAID = "one\u2028two"


class Server(BaseHTTPRequestHandler):
    escaped = False

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        streams = asked.get("stream")
        if self.path == "/api/chat":
            message = {"role": "assistant", "content": SAID}
            reply = {"model": "m", "message": message, "done": True, "done_reason": "stop"}
            lines = [reply]
        else:
            choice = {"index": 0, "delta" if streams else "message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}
            reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            lines = [reply]
        text = "".join(json.dumps(line, ensure_ascii=self.escaped) + "\n" for line in lines)
        if streams and self.path != "/api/chat":
            text = "".join(f"data: {line}\n\n" for line in (text[:-1], "[DONE]"))
        data = text.encode()
        self.send_response(200)
        kind = "application/json" if not streams else "application/x-ndjson" if self.path == "/api/chat" else "text/event-stream"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}"
asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def by_ollama(stream):
    reply = Client(host=address).chat(**asked, stream=stream)
    return "".join(piece.message.content for piece in (reply if stream else [reply]))


def by_hugging_face(stream):
    client = InferenceClient(base_url=f"{address}/v1", api_key="-")
    reply = client.chat_completion(**asked, stream=stream)
    return "".join(piece.choices[0].delta.content for piece in reply) if stream else reply.choices[0].message.content


def by_openai(stream):
    reply = OpenAI(base_url=f"{address}/v1", api_key="-").chat.completions.create(**asked, stream=stream)
    return "".join(piece.choices[0].delta.content for piece in reply) if stream else reply.choices[0].message.content


for ask in (by_ollama, by_hugging_face, by_openai):
    for Server.escaped in (False, True):
        for stream in (False, True):
            try:
                told = "as it was said" if ask(stream) == SAID else "otherwise"
            except Exception as error:
                told = type(error).__name__
            print(ask.__name__, "escaped," if Server.escaped else "as it is,", "streamed:" if stream else "whole:", told)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
by_ollama as it is, whole: as it was said
by_ollama as it is, streamed: JSONDecodeError
by_ollama escaped, whole: as it was said
by_ollama escaped, streamed: as it was said
by_hugging_face as it is, whole: as it was said
by_hugging_face as it is, streamed: JSONDecodeError
by_hugging_face escaped, whole: as it was said
by_hugging_face escaped, streamed: as it was said
by_openai as it is, whole: as it was said
by_openai as it is, streamed: as it was said
by_openai escaped, whole: as it was said
by_openai escaped, streamed: as it was said
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
