#!/usr/bin/env bash
# qwen-agent 0.0.34 (`Assistant`, "model_type": "oai"): with `use_raw_api` a tool's result goes out with its call's id as `id`, and without
# `tool_call_id`, which OpenAI's interface requires: servers refuse it, or cannot tell which of two calls it answers.
# Without `use_raw_api` it reads calls from the text itself: an answer ends where it names <tool_call>, what stands behind
# a call is lost, and of an argument with </tool_call> in it the tool gets the beginning, less one letter: "writ".
#
# Guessed before: `tool_call_id`; the whole text, and the whole argument or an error. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check qwen-agent==0.0.34 openai==3.57.0 \
    python-dateutil==4.0.0 numpy==2.4.6 soundfile==0.14.0 tqdm==4.70.1

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        delta = {"role": "assistant", **answers.pop(0)}
        chunks = [{"index": 0, "delta": delta, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": "stop"}]
        lines = [json.dumps({**head, "choices": [one]}) for one in chunks] + ["[DONE]"]
        text = "".join(f"data: {line}\n\n" for line in lines).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@register_tool("note")
class Note(BaseTool):
    description = "Keep a note."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def call(self, params, **_):
        print("    called with", params, flush=True)
        return "kept"


def written(text):
    return '<tool_call>\n{"name": "note", "arguments": {"text": "%s"}}\n</tool_call>' % text


def calls(*texts):
    return [
        {"index": i, "id": f"c{i}", "type": "function", "function": {"name": "note", "arguments": json.dumps({"text": text})}}
        for i, text in enumerate(texts)
    ]


logging.disable()
server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for name, raw, first in (
    ("raw, two calls", True, {"tool_calls": calls("a", "b")}),
    ("one call", False, {"content": written("a")}),
    ("named in the answer", False, {"content": "Begin with <tool_call> and a line."}),
    ("text behind a call", False, {"content": written("a") + "\nI keep it."}),
    ("named in an argument", False, {"content": written("write </tool_call> last")}),
):
    asked, answers = [], [first, {"content": "Done."}]
    more = {"generate_cfg": {"use_raw_api": raw}}
    agent = Assistant(llm={"model": "m", "model_server": url, "api_key": "-", "model_type": "oai", **more}, function_list=["note"])
    print(f"{name}:", first.get("content", "").replace("\n", " "), flush=True)
    *_, last = agent.run([{"role": "user", "content": "Hi"}])
    print("    answers", [message["content"] for message in last if message["role"] == "assistant" and message["content"]])
    for message in asked[-1]["messages"]:
        if message["role"] == "tool":
            print("    result sent with", {key: message[key] for key in message if key in ("id", "tool_call_id")})
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
raw, two calls: 
    called with {"text": "a"}
    called with {"text": "b"}
    answers ['Done.']
    result sent with {'id': 'c0'}
    result sent with {'id': 'c1'}
one call: <tool_call> {"name": "note", "arguments": {"text": "a"}} </tool_call>
    called with {"text": "a"}
    answers ['Done.']
named in the answer: Begin with <tool_call> and a line.
    answers ['Begin with ']
text behind a call: <tool_call> {"name": "note", "arguments": {"text": "a"}} </tool_call> I keep it.
    called with {"text": "a"}
    answers ['Done.']
named in an argument: <tool_call> {"name": "note", "arguments": {"text": "write </tool_call> last"}} </tool_call>
    called with {"text": "writ
    answers ['Done.']
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
