#!/usr/bin/env bash
# outlines 1.3.3 asks vLLM and SGLang for a `dict` by a grammar of any JSON value: 5, "five" and [1] match it (lark 1.3.1), and what comes is
# given as it is. To SGLang it goes as `ebnf`, with a warning, in Lark's form, which xgrammar 0.2.9, SGLang's default, does not read
# ("Unexpected character"), so that `dict` is an error there whatever the user writes. `from_openai` sends `json_object` for the
# same type, and an object comes.
#
# Guessed before: an object, and a grammar in the server's own form. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check outlines==1.3.3 openai==3.57.0 lark==1.3.1
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.23.0 apache-tvm-ffi==0.1.15.post2
"$python" -m pip install --quiet --disable-pip-version-check --no-deps xgrammar==0.2.9
seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import lark
import openai
import outlines
import xgrammar

sent = {}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        sent.clear()
        sent.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        choice = {"index": 0, "message": {"role": "assistant", "content": "5"}, "finish_reason": "stop"}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
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
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-")
for make in (outlines.from_vllm, outlines.from_sglang, outlines.from_openai):
    answer = make(client, "m")("Describe it.", dict)
    asked = {key: value for key, value in sent.items() if key not in ("model", "messages")}
    grammar = asked.get("structured_outputs", asked).get("grammar", asked.get("ebnf"))
    print(f"{make.__name__}: {', '.join(asked)}; the answer is {answer!r}")
    if not grammar:
        print("   ", asked)
        continue
    parser = lark.Lark(grammar, start="start")
    for text in ("5", '"five"', "[1]", '{"a": 1}', "five"):
        try:
            parser.parse(text)
            print(f"    {text} matches")
        except lark.exceptions.LarkError:
            print(f"    {text} does not match")
    try:
        xgrammar.Grammar.from_ebnf(grammar)
        print("    xgrammar reads it")
    except Exception as error:
        print("    xgrammar:", "Unexpected character" if "Unexpected character" in str(error) else error)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
from_vllm: structured_outputs; the answer is '5'
    5 matches
    "five" matches
    [1] matches
    {"a": 1} matches
    five does not match
    xgrammar: Unexpected character
from_sglang: ebnf; the answer is '5'
    5 matches
    "five" matches
    [1] matches
    {"a": 1} matches
    five does not match
    xgrammar: Unexpected character
from_openai: response_format; the answer is '5'
    {'response_format': {'type': 'json_object'}}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
