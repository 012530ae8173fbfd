#!/usr/bin/env bash
# instructor 1.17.0 describes a list of models (`response_model=list[User]`) as an object whose `tasks` may be left out
# ("required": []), so that a server which holds the schema may end the answer at {}, which is read as an empty list, without an
# error or a retry. A model with the same field has it required. And what it yields last of a streamed answer that `max_tokens`
# ended (`create_partial`) is what came, {"name": "Ann", "score": 12 where 1250 was to come, without an error; the same answer
# whole (`create`) is an IncompleteOutputException.
#
# Guessed before: `tasks` is required, and the stream ends with the error. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check instructor==1.17.0 openai==3.3.0 pydantic==2.14.4

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import instructor
from openai import OpenAI
from pydantic import BaseModel

CUT = '{"name": "Ann", "score": 12'
asked = []


class User(BaseModel):
    name: str
    score: int


class Users(BaseModel):
    tasks: list[User]


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked.append(body)
        head = {"id": "x", "created": 0, "model": "m"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.send_response(200)
        if body.get("stream"):
            pieces = [({"role": "assistant", "content": CUT}, None), ({}, "length")]
            chunks = [{"index": 0, "delta": delta, "finish_reason": end} for delta, end in pieces]
            head["object"] = "chat.completion.chunk"
            lines = [json.dumps({**head, "choices": [chunk]}) for chunk in chunks] + ["[DONE]"]
            return self.send("".join(f"data: {line}\n\n" for line in lines), "text/event-stream")
        message = {"role": "assistant", "content": CUT}
        end = "length"
        if "tools" in body:
            call = {"id": "c1", "type": "function"}
            call["function"] = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
            message, end = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": end}
        self.send(json.dumps({**head, "object": "chat.completion", "choices": [choice], "usage": usage}), "application/json")

    def send(self, text, kind):
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-")
given = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_retries": 0}
for kind in (list[User], Users):
    try:
        read = instructor.from_openai(client).create(**given, response_model=kind)
    except Exception as error:
        read = type(error).__name__
    print(asked[-1]["tools"][0]["function"]["parameters"]["required"], "{} is read as", read)
by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
try:
    print("whole:", by_schema.create(**given, response_model=User))
except Exception as error:
    print("whole:", type(error).__name__)
*_, last = by_schema.create_partial(**given, response_model=User)
print("streamed:", last)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
[] {} is read as []
['tasks'] {} is read as InstructorRetryException
whole: IncompleteOutputException
streamed: name='Ann' score=12
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
