#!/usr/bin/env bash
# pydantic 2.14.4's schema of a dataclass has fields that are not given to it, `field(init=False, default=...)`, and its reader
# passes over what an answer says of them: the model writes a value, and the object has the default. `parse` of openai 3.57.0
# makes such a field a required one. A field without a default (`__post_init__` sets it) is not in the schema.
#
# Guessed before: no such field is in the schema, with a default or without. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/fields.py" <<'PYTHON'
import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai
import pydantic


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        schema = body["response_format"]["json_schema"]["schema"]
        print("asked for:", schema["required"])
        message = {"role": "assistant", "content": '{"price": 2, "currency": "USD"}'}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        told = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, *_):
        pass


def order(decorator):
    @decorator
    class Order:
        price: int
        currency: str = dataclasses.field(init=False, default="EUR")
        label: str = dataclasses.field(init=False)

        def __post_init__(self):
            self.label = f"{self.price} {self.currency}"

    return Order


print("pydantic", pydantic.VERSION, "openai", openai.__version__)
plain = pydantic.TypeAdapter(order(dataclasses.dataclass))
print("dataclass:", sorted(plain.json_schema()["properties"]))
print("read:", dataclasses.asdict(plain.validate_json('{"price": 2, "currency": "USD"}')))
server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
answer = client.chat.completions.parse(
    model="m",
    messages=[{"role": "user", "content": "Two dollars."}],
    response_format=order(pydantic.dataclasses.dataclass),
)
print("answered:", answer.choices[0].message.content)
print("parsed:", dataclasses.asdict(answer.choices[0].message.parsed))
PYTHON

python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check pydantic==2.14.4 openai==3.57.0

seen=$("$python" "$folder/fields.py")
expected=$(cat <<'TEXT'
pydantic 2.14.4 openai 3.57.0
dataclass: ['currency', 'price']
read: {'price': 2, 'currency': 'EUR', 'label': '2 EUR'}
asked for: ['price', 'currency']
answered: {"price": 2, "currency": "USD"}
parsed: {'price': 2, 'currency': 'EUR', 'label': '2 EUR'}
TEXT
)
printf '%s\n' "$seen"
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
