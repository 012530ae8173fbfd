#!/usr/bin/env bash
# semantic-kernel 1.45.0 describes parameters of a function otherwise than they are: `Literal["x", "y"]`, `datetime` and
# `Decimal` go out as {"type": "object"}, alone and within a pydantic model, so that a server which holds calls to
# their schemas lets the model write objects alone, which no such parameter takes. An `Enum` goes out as it is. What `Field`
# says of a bound is the `description`, which is an object then ({"ge": 0}) and no text, as JSON Schema wants it.
# `response_format` of the same model is right.
#
# Guessed before: an `enum` for the first, strings for the others, the description as text. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check semantic-kernel==1.45.0 openai==3.57.0

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import asyncio
import json
import threading
from datetime import datetime
from decimal import Decimal
from enum import Enum
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Unit(str, Enum):
    c = "C"
    f = "F"


class Stay(BaseModel):
    unit: Unit
    kind: Literal["x", "y"]
    begin: datetime
    price: Decimal
    nights: int = Field(ge=1)


class Hotel:
    @kernel_function(name="book", description="Book a room.")
    def book(self, kind: Literal["x", "y"], begin: datetime, stay: Stay) -> str:
        return "done"


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "tools" in asked:
            sent = asked["tools"][0]["function"]["parameters"]["properties"]
        else:
            sent = asked["response_format"]["json_schema"]["schema"]["properties"]
        for name, schema in (sent | sent.get("stay", {}).get("properties", {})).items():
            if name != "stay":
                print(f"  {name}: {json.dumps(schema)}", flush=True)
        message = {"role": "assistant", "content": "Hello"}
        reply = json.dumps(
            {
                "id": "x", "object": "chat.completion", "created": 0, "model": "m",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


async def ask(url):
    client = AsyncOpenAI(base_url=url, api_key="-")
    service = OpenAIChatCompletion(ai_model_id="m", async_client=client)
    kernel, history = Kernel(), ChatHistory()
    kernel.add_plugin(Hotel(), "hotel")
    history.add_user_message("Hi")
    print("function", flush=True)
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
    await service.get_chat_message_contents(history, settings, kernel=kernel)
    print("response_format", flush=True)
    await service.get_chat_message_contents(history, OpenAIChatPromptExecutionSettings(response_format=Stay))


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
asyncio.run(ask(f"http://127.0.0.1:{server.server_port}/v1"))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
function
  kind: {"type": "object"}
  begin: {"type": "object"}
  unit: {"type": "string", "enum": ["C", "F"]}
  price: {"type": "object"}
  nights: {"type": "integer", "description": {"ge": 1}}
response_format
  unit: {"$ref": "#/$defs/Unit"}
  kind: {"enum": ["x", "y"], "title": "Kind", "type": "string"}
  begin: {"format": "date-time", "title": "Begin", "type": "string"}
  price: {"anyOf": [{"type": "number"}, {"pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "type": "string"}], "title": "Price"}
  nights: {"minimum": 1, "title": "Nights", "type": "integer"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
