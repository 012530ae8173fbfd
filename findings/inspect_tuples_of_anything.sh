#!/usr/bin/env bash
# inspect-ai 0.3.285 describes types of its own otherwise than they are, without a word. Of a tool's parameters `tuple[float, str]`
# is a list of numbers of any length, so that a server which holds calls to their schemas never lets the text be written; a
# `Decimal` is anything, and the bounds of a `Field` are gone. What comes is passed on: (1.0, 2.0) as the tuple, a text as
# the `Decimal`, without an error. Of an answer (`ResponseSchema(json_schema=json_schema(Model))`) the tuple
# is any list, and `min_length` of a list is gone; bounds of numbers are there. A model that holds models of its
# own kind holds anything from the second level on, in both.
#
# Guessed before: `prefixItems`, bounds and `$ref`, as pydantic writes them, or an error for the call. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check inspect-ai==0.3.285 openai==3.57.0 pydantic==2.14.4

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import asyncio
import json
import threading
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Annotated

from inspect_ai.model import ChatMessageUser, GenerateConfig, ResponseSchema, get_model
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel, Field

class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", **answers.pop(0)}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        end = "tool_calls" if "tool_calls" in message else "stop"
        reply["choices"] = [{"index": 0, "message": message, "finish_reason": end}]
        reply["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        text = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


asked = []
server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"


class Node(BaseModel):
    children: list["Node"]


class Answer(BaseModel):
    days: int = Field(ge=1, le=7)
    point: tuple[float, str]
    few: list[int] = Field(min_length=1, max_length=3)
    node: Node


@tool
def book():
    async def execute(days: Annotated[int, Field(ge=1, le=7)], point: tuple[float, str], price: Decimal, node: Node) -> str:
        """Book.

        Args:
            days: days
            point: point
            price: price
            node: node
        """
        print("called:", days, point, repr(price))
        return "ok"

    return execute


def show(title, schema):
    print(title)
    for name, given in schema["properties"].items():
        given.pop("description", None)
        if name == "node":
            given = given["properties"]["children"]["items"]["properties"]["children"]
        print(f"  {name}: {json.dumps(given)}")


async def run():
    model = get_model("openai/m", base_url=url, api_key="-", responses_api=False)
    arguments = {"days": 3, "point": [1, 2], "price": "1.5", "node": {"children": []}}
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": json.dumps(arguments)}}
    answers.extend([{"content": None, "tool_calls": [call]}, {"content": "Done"}, {"content": "{}"}])
    messages, _ = await model.generate_loop([ChatMessageUser(content="Hi")], tools=[book()])
    print("error:", messages[1].error)
    form = ResponseSchema(name="answer", json_schema=json_schema(Answer))
    await model.generate("Hi", config=GenerateConfig(response_schema=form))
    show("tool", asked[0]["tools"][0]["function"]["parameters"])
    show("answer", asked[-1]["response_format"]["json_schema"]["schema"])


answers = []
asyncio.run(run())
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
called: 3 (1.0, 2.0) '1.5'
error: None
tool
  days: {"type": "integer"}
  point: {"type": "array", "items": {"type": "number"}}
  price: {}
  node: {"type": "array", "items": {}}
answer
  days: {"type": "integer", "minimum": 1, "maximum": 7}
  point: {"type": "array"}
  few: {"type": "array", "items": {"type": "integer"}}
  node: {"type": "array", "items": {}}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
