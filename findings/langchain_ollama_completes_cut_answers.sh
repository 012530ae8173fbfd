#!/usr/bin/env bash
# langchain-ollama 1.1.0 (core 1.8.3): `with_structured_output(Model)` completes an answer that `num_predict` ended
# (`done_reason` "length"): of {"name": "Ann", "score": 12 where 1250 was to come, the program gets score 12, without an error, and
# of a list that was cut its beginning; so with `method="json_schema"`, the default, and "json_mode", whole and streamed. ChatOpenAI
# (langchain-openai 1.7.4) raises LengthFinishReasonError for the same answer.
#
# Guessed before: an error, as for text that is no JSON. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  langchain-ollama==1.1.0 langchain-openai==1.7.4 langchain-core==1.8.3 openai==3.57.0 ollama==0.6.3 pydantic==2.14.4
seen=$("$folder/venv/bin/python" -W ignore - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

said = ""


class Person(BaseModel):
    name: str
    score: int
    tags: list[str] = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": said}
        if self.path == "/api/chat":
            reply = {"model": "m", "message": message, "done": True, "done_reason": "length"}
        else:
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}
            reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        text = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}"
models = {
    "ChatOllama": ChatOllama(model="m", base_url=address),
    "ChatOpenAI": ChatOpenAI(model="m", base_url=f"{address}/v1", api_key="-"),
}
for said in ('{"name": "Ann", "score": 12', '{"name": "Ann", "score": 1250, "tags": ["tea", "mi', "no JSON"):
    print(said)
    for name, model in models.items():
        for method in ("json_schema", "json_mode"):
            ask = model.with_structured_output(Person, method=method)
            for way in (("whole", "streamed") if name == "ChatOllama" else ("whole",)):
                try:
                    told = repr(ask.invoke("Who?") if way == "whole" else list(ask.stream("Who?"))[-1])
                except Exception as error:
                    told = type(error).__name__
                print(f"  {name}, {method}, {way}: {told}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"name": "Ann", "score": 12
  ChatOllama, json_schema, whole: Person(name='Ann', score=12, tags=[])
  ChatOllama, json_schema, streamed: Person(name='Ann', score=12, tags=[])
  ChatOllama, json_mode, whole: Person(name='Ann', score=12, tags=[])
  ChatOllama, json_mode, streamed: Person(name='Ann', score=12, tags=[])
  ChatOpenAI, json_schema, whole: LengthFinishReasonError
  ChatOpenAI, json_mode, whole: LengthFinishReasonError
{"name": "Ann", "score": 1250, "tags": ["tea", "mi
  ChatOllama, json_schema, whole: Person(name='Ann', score=1250, tags=['tea', 'mi'])
  ChatOllama, json_schema, streamed: Person(name='Ann', score=1250, tags=['tea', 'mi'])
  ChatOllama, json_mode, whole: Person(name='Ann', score=1250, tags=['tea', 'mi'])
  ChatOllama, json_mode, streamed: Person(name='Ann', score=1250, tags=['tea', 'mi'])
  ChatOpenAI, json_schema, whole: LengthFinishReasonError
  ChatOpenAI, json_mode, whole: LengthFinishReasonError
no JSON
  ChatOllama, json_schema, whole: OutputParserException
  ChatOllama, json_schema, streamed: IndexError
  ChatOllama, json_mode, whole: OutputParserException
  ChatOllama, json_mode, streamed: IndexError
  ChatOpenAI, json_schema, whole: LengthFinishReasonError
  ChatOpenAI, json_mode, whole: LengthFinishReasonError
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
