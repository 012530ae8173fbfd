#!/usr/bin/env bash
# autogen-ext 0.7.5 (`OpenAIChatCompletionClient`) loses letters of a model's thoughts (`reasoning_content`) when they are
# streamed: t, h, i, n, k, "<", ">" at their beginning, and "/", too, at their end. "the sum is within" is "e sum is w" as
# `thought`; of a whole answer it is right. Streamed thoughts are also given out as pieces of the text, between
# <think> and </think>. Beside a call `thought` is the text before the call, and the thoughts are in no result.
#
# Guessed before: `thought` is `reasoning_content` in all of them. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check "autogen-ext[openai]==0.7.5" openai==3.57.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

THOUGHT = {"role": "assistant", "reasoning_content": "the sum is within"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message, end = {**THOUGHT, "content": "I add."}, "stop"
        if "tools" in asked:
            message, end = {**message, "tool_calls": [CALL]}, "tool_calls"
        head = {"id": "x", "created": 0, "model": "m", "object": "chat.completion"}
        if asked.get("stream"):
            head["object"] += ".chunk"
            deltas = [THOUGHT, {"content": "I add."}]
            if "tools" in asked:
                deltas.append({"tool_calls": [{"index": 0, **CALL}]})
            choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
            choices.append({"index": 0, "delta": {}, "finish_reason": end})
            events = [json.dumps({**head, "choices": [one]}) for one in choices]
            reply = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        else:
            choice = {"index": 0, "message": message, "finish_reason": end}
            reply = json.dumps({**head, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if asked.get("stream") else "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


def add(a: int) -> int:
    return a


async def ask(url):
    able = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    client = OpenAIChatCompletionClient(
        model="m", base_url=url, api_key="-", model_info={**able, "family": "unknown"}
    )
    said = [UserMessage(content="Hi", source="user")]
    for tools in ([], [FunctionTool(add, description="Add.")]):
        calls = "calls" if tools else "text"
        result = await client.create(said, tools=tools)
        print(f"{calls}, whole: thought {result.thought!r}")
        *pieces, result = [one async for one in client.create_stream(said, tools=tools)]
        print(f"{calls}, streamed: thought {result.thought!r}, pieces {pieces}")


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
asyncio.run(ask(f"http://127.0.0.1:{server.server_port}/v1"))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
text, whole: thought 'the sum is within'
text, streamed: thought 'e sum is w', pieces ['<think>the sum is within', '</think>', 'I add.']
calls, whole: thought 'I add.'
calls, streamed: thought 'I add.', pieces ['<think>the sum is within', '</think>', 'I add.']
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
