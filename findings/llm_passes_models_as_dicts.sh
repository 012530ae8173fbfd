#!/usr/bin/env bash
# llm 0.36 and kani 1.10.0 describe a tool's parameter `Annotated[int, Field(ge=1, le=7)]` as any integer, so that a server which holds
# calls to their schemas may write 9; within a pydantic model llm keeps the bound, and so does kani. llm calls the function
# with a dict for a parameter that is annotated as a pydantic model, which it describes as one: `trip.days` is an
# AttributeError, sent to the model as the tool's result.
#
# Guessed before: the bound is sent, and the function gets a model. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check llm==0.36 kani==1.10.0 openai==3.57.0 pydantic==2.14.4

seen=$(LLM_USER_PATH="$folder" "$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Annotated

from kani import AIFunction
from llm.default_plugins.openai_models import Chat
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


class Trip(BaseModel):
    days: Annotated[int, Field(ge=1, le=7)]


def book(days: Annotated[int, Field(ge=1, le=7)], trip: Trip) -> str:
    """Book."""
    print("llm calls:", days, trip)
    return f"booked {trip.days}"


call = {"id": "c1", "type": "function"}
call["function"] = {"name": "book", "arguments": json.dumps({"days": 3, "trip": {"days": 3}})}
answers = [{"content": None, "tool_calls": [call]}, {"content": "Done"}]
model = Chat("m", model_name="m", api_base=url, supports_tools=True)
model.key = "-"
model.chain("Hi", tools=[book], stream=False).text()
schema = asked[0]["tools"][0]["function"]["parameters"]
print("llm sends:", schema["properties"]["days"], schema["$defs"]["Trip"]["properties"]["days"])
print("the model reads:", asked[1]["messages"][-1]["content"])

tool = AIFunction(book)
sent = tool.json_schema["properties"]
sent["trip"]["properties"]["days"].pop("title", None)
print("kani sends:", sent["days"], sent["trip"]["properties"]["days"])

PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
llm calls: 3 {'days': 3}
llm sends: {'type': 'integer'} {'maximum': 7, 'minimum': 1, 'type': 'integer'}
the model reads: Error: 'dict' object has no attribute 'days'
kani sends: {'type': 'integer'} {'maximum': 7, 'minimum': 1, 'type': 'integer'}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
