#!/usr/bin/env bash
# any-llm-sdk 1.40.2 describes the parameters of a Python function (`completion(tools=[function])`) as texts where it does not know
# better: `Any` is {"type": "string"}, the values of `dict[str, Any]` and the items of a plain `list` are strings, a `Decimal` is one.
# So a server which holds calls to their schemas makes the model write "3" for 3. `Optional[int]` is an integer that is
# required, without null, also within a pydantic model, and the bounds of a `Field` are gone. `response_format` of a
# model goes out as pydantic writes it.
#
# Guessed before: no constraint for `Any`, and null for `Optional`. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check any-llm-sdk[openai]==1.40.2 openai==3.57.0 pydantic==2.14.4

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Annotated, Any, Optional

from any_llm import completion
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
    note: Optional[str]


def book(
    value: Any,
    more: dict[str, Any],
    items: list,
    price: Decimal,
    days: Optional[int],
    trip: Trip,
    seats: Annotated[int, Field(ge=1, le=7)],
) -> str:
    """Book."""
    return ""


answers = [{"content": "Hello"}]
given = {"model": "m", "provider": "openai", "api_base": url, "api_key": "-"}
completion(**given, messages=[{"role": "user", "content": "Hi"}], tools=[book])
schema = asked[0]["tools"][0]["function"]["parameters"]
for name, sent in schema["properties"].items():
    sent.pop("description", None)
    print(f"{name}: {json.dumps(sent)}")
print("required", schema["required"])
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
value: {"type": "string"}
more: {"type": "object", "additionalProperties": {"type": "string"}}
items: {"type": "array", "items": {"type": "string"}}
price: {"type": "string"}
days: {"type": "integer"}
trip: {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
seats: {"type": "integer"}
required ['value', 'more', 'items', 'price', 'days', 'trip', 'seats']
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
