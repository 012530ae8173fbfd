#!/usr/bin/env bash
# agent-framework-openai 1.17.0 (core 1.23.0), Microsoft's Agent Framework: of a streamed answer of `/v1/responses`,
# `OpenAIChatClient` gives out every piece and then the whole text again (of the event `response.output_text.done`), marked
# `merge_mode` "replace". A program that prints `update.text` of each update, as the package's own docstring does, prints the
# answer twice. The final response has it once. `OpenAIChatCompletionClient`, which asks `/v1/chat/completions`, gives out the
# pieces alone.
#
# Guessed before: the pieces are the text. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check agent-framework-openai==1.17.0 agent-framework-core==1.23.0 openai==3.57.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

PIECES = ["Hello", ", world"]


def of_responses():
    text = "".join(PIECES)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"id": "i", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    begun = {**item, "status": "in_progress", "content": []}
    whole = {"id": "r", "object": "response", "created_at": 0, "model": "m", "status": "in_progress", "output": []}
    whole |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    at = {"item_id": "i", "output_index": 0, "content_index": 0}
    yield {"type": "response.created", "response": whole}
    yield {"type": "response.output_item.added", "output_index": 0, "item": begun}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    for piece in PIECES:
        yield {"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []}
    yield {"type": "response.output_text.done", **at, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **at, "part": part}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": "response.completed", "response": {**whole, "status": "completed", "output": [item]}}


def of_chats():
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    for piece, end in ((PIECES[0], None), (PIECES[1], "stop")):
        delta = {"role": "assistant", "content": piece}
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        events = of_responses() if self.path.endswith("/responses") else of_chats()
        text = ""
        for number, event in enumerate(events):
            name = f"event: {event['type']}\n" if "type" in event else ""
            text += f"{name}data: {json.dumps({**event, 'sequence_number': number})}\n\n"
        text += "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"


async def run():
    for kind in (OpenAIChatClient, OpenAIChatCompletionClient):
        stream = Agent(client=kind(model="m", base_url=url, api_key="-")).run("Hi", stream=True)
        printed = [update.text async for update in stream if update.text]
        final = await stream.get_final_response()
        print(kind.__name__, printed, "final:", repr(final.text))


asyncio.run(run())
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
OpenAIChatClient ['Hello', ', world', 'Hello, world'] final: 'Hello, world'
OpenAIChatCompletionClient ['Hello', ', world'] final: 'Hello, world'
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
