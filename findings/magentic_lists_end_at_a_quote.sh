#!/usr/bin/env bash
# magentic 0.41.1 loses what stands behind an escaped quote in a list (`list[str]`, `list[Model]`, `set[str]`, `Iterable[str]`): of
# {"value": ["tea", "say \"hi\"", "milk"]} the program gets ["tea"], without an error. So it is with what `max_tokens`
# ended: [10, 20, 12 where 1250 was to come is [10, 20], and {"value": [ is []. A model with a field of the same list
# gets all of it, and an error for what was cut.
#
# Guessed before: the list, and an error for the cut one. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check magentic==0.41.1 openai==3.57.0 pydantic==2.14.4

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from magentic import OpenaiChatModel, prompt
from pydantic import BaseModel


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        call = {"index": 0, "id": "c1", "type": "function"}
        call["function"] = {"name": asked["tools"][0]["function"]["name"], "arguments": arguments}
        end = "tool_calls" if arguments.endswith("}") else "length"
        chunks = [{"role": "assistant", "tool_calls": [call]}, None], [{}, end]
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        lines = [json.dumps({**head, "choices": [{"index": 0, "delta": d, "finish_reason": e}]}) for d, e in chunks]
        text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Item(BaseModel):
    name: str


class Items(BaseModel):
    value: list[str]


class Numbers(BaseModel):
    value: list[int]


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = OpenaiChatModel("m", api_key="-", base_url=f"http://127.0.0.1:{server.server_port}/v1")
TEXTS = ["tea", 'say "hi"', "milk"]


@prompt("List.", model=model)
def texts() -> list[str]: ...


@prompt("List.", model=model)
def items() -> list[Item]: ...


@prompt("List.", model=model)
def in_a_model() -> Items: ...


@prompt("List.", model=model)
def numbers() -> list[int]: ...


@prompt("List.", model=model)
def numbers_in_a_model() -> Numbers: ...


for ask, arguments in (
    (texts, json.dumps({"value": TEXTS})),
    (items, json.dumps({"value": [{"name": text} for text in TEXTS]})),
    (in_a_model, json.dumps({"value": TEXTS})),
    (numbers, '{"value": [10, 20, 12'),
    (numbers, '{"value": ['),
    (numbers_in_a_model, '{"value": [10, 20, 12'),
):
    try:
        read = repr(ask())
    except Exception as error:
        read = type(error).__name__
    print(f"{ask.__name__}: {arguments} -> {read}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
texts: {"value": ["tea", "say \"hi\"", "milk"]} -> ['tea']
items: {"value": [{"name": "tea"}, {"name": "say \"hi\""}, {"name": "milk"}]} -> [Item(name='tea')]
in_a_model: {"value": ["tea", "say \"hi\"", "milk"]} -> Items(value=['tea', 'say "hi"', 'milk'])
numbers: {"value": [10, 20, 12 -> [10, 20]
numbers: {"value": [ -> []
numbers_in_a_model: {"value": [10, 20, 12 -> ToolSchemaParseError
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
