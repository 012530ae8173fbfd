#!/usr/bin/env bash
# camel-ai 0.2.90 (`ChatAgent`, "stream": True) forgets what the model said before a call: the text comes in the stream, and in the next request
# the message with the call has "content": "". Of a whole answer the text is kept. A streamed answer with a call that
# `max_tokens` ended is its text alone, without an error and without the call. Of a whole one it is a JSONDecodeError.
#
# Guessed before: the text is kept, and an error both times. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check camel-ai==0.2.90 mcp==1.30.0 openai==3.57.0 pydantic==2.12.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


class Words(BaseTokenCounter):
    """Stands in for tiktoken's counter, which loads a file."""

    def count_tokens_from_messages(self, messages):
        return 1

    def encode(self, text):
        return [1] * len(text.split())

    def decode(self, token_ids):
        return ""


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked.append(body)
        head = {"id": "x", "created": 0, "model": "m"}
        first = len(asked) == 1
        said = {"role": "assistant", "content": "Done."}
        if first:
            call = {"id": "c1", "type": "function", "function": {"name": "note", "arguments": written}}
            said = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"index": 0, **call}]}
        end = "stop" if not first else "tool_calls" if written.endswith("}") else "length"
        if body.get("stream"):
            pieces = [({"role": "assistant", "content": said.pop("content")}, None), (said, None), ({}, end)]
            chunks = [{"index": 0, "delta": delta, "finish_reason": last} for delta, last in pieces]
            lines = [json.dumps({**head, "object": "chat.completion.chunk", "choices": [one]}) for one in chunks]
            text, kind = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream"
        else:
            choice = {"index": 0, "message": said, "finish_reason": end}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            text, kind = json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}), "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def note(n: int) -> str:
    """Keep a note.

    Args:
        n (int): the note
    """
    return "kept"


logging.disable()
server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for written in ('{"n": 1}', '{"n": 12'):
    for stream in (False, True):
        asked = []
        given = {"model_type": "m", "url": url, "api_key": "-", "token_counter": Words(), "model_config_dict": {"stream": stream}}
        model = ModelFactory.create(model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL, **given)
        agent = ChatAgent("Help.", model=model, tools=[note])
        try:
            answer = agent.step("Hi")
            said = [one.msgs[0].content for one in answer] if stream else [answer.msgs[0].content]
        except Exception as error:
            said = type(error).__name__
        back = [message["content"] for message in asked[-1]["messages"] if message["role"] == "assistant"]
        print(written, "streamed:" if stream else "whole:", said, "sent back:", back)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"n": 1} whole: ['Done.'] sent back: ['Let me see.']
{"n": 1} streamed: ['Let me see.', 'Done.'] sent back: ['']
{"n": 12 whole: JSONDecodeError sent back: []
{"n": 12 streamed: ['Let me see.'] sent back: []
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
