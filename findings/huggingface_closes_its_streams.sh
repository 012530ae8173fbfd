#!/usr/bin/env bash
# huggingface_hub 2.4.0: a stream of `InferenceClient` ends with `StreamClosed` where nobody keeps the client, as in
#   for piece in InferenceClient(base_url=...).chat_completion(messages, stream=True)
# or where a function makes a client and returns the stream: the object closes its connections when it is collected, and the
# stream does not hold it. With the client in a variable beside the loop the same stream is read. openai 3.57.0 reads
# both, and so does the async client of the same package.
#
# Guessed before: a stream keeps alive what it reads from. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  huggingface_hub==2.4.0 openai==3.57.0 httpx==0.28.1
seen=$("$folder/venv/bin/python" -W ignore - <<'PYTHON'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import AsyncInferenceClient, InferenceClient
from openai import OpenAI


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text in ("one ", "two ", "three"):
            choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
            chunk = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1"
asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


def hugging_face():
    client = InferenceClient(base_url=address, api_key="-")
    return client, client.chat_completion(**asked)


def of_openai():
    client = OpenAI(base_url=address, api_key="-")
    return client, client.chat.completions.create(**asked)


async def not_waiting():
    stream = await AsyncInferenceClient(base_url=address, api_key="-").chat_completion(**asked)
    return "".join([piece.choices[0].delta.content async for piece in stream])


def read(stream):
    try:
        return "".join(piece.choices[0].delta.content for piece in stream)
    except Exception as error:
        return type(error).__name__


for make in (hugging_face, of_openai):
    client, stream = make()
    print(make.__name__, "kept:", read(stream))
    print(make.__name__, "not kept:", read(make()[1]))
print("async, not kept:", asyncio.run(not_waiting()))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
hugging_face kept: one two three
hugging_face not kept: StreamClosed
of_openai kept: one two three
of_openai not kept: one two three
async, not kept: one two three
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
