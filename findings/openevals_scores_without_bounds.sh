#!/usr/bin/env bash
# openevals 0.2.2 (`create_llm_as_judge`): a judge's score that is "from 0.0 to 1.0" (`continuous=True`) has neither bound in the schema that is
# sent, and is not looked at: 85 is a score of 85, which raises a mean of scores as 85 right answers would. Where
# `choices` are given they are an `enum` of the schema, and what is none of them is a score as well. The bounds stand
# in the description of the field alone.
#
# Guessed before: the schema has the bounds, or a score beyond them is an error. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q openevals==0.2.2 openai==3.57.0
cat >"$folder/ask.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import OpenAI
from openevals.llm import create_llm_as_judge

asked, said = {}, ""


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-", max_retries=0)
for how in ({"continuous": True}, {"choices": [0.0, 0.5, 1.0]}):
    judge = create_llm_as_judge(prompt="Rate: {outputs}", judge=client, model="m", use_reasoning=False, **how)
    for score in (0.5, 85):
        said = json.dumps({"score": score})
        found = judge(outputs="Hello.")
        print(f"{how}: {said} -> {found['score']}")
    field = asked["response_format"]["json_schema"]["schema"]["properties"]["score"]
    print("  asked for:", {key: value for key, value in field.items() if key != "description"})
PYTHON

seen=$("$folder/venv/bin/python" "$folder/ask.py" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{'continuous': True}: {"score": 0.5} -> 0.5
{'continuous': True}: {"score": 85} -> 85
  asked for: {'type': 'number'}
{'choices': [0.0, 0.5, 1.0]}: {"score": 0.5} -> 0.5
{'choices': [0.0, 0.5, 1.0]}: {"score": 85} -> 85
  asked for: {'type': 'number', 'enum': [0.0, 0.5, 1.0]}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
