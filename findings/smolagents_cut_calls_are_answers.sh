#!/usr/bin/env bash
# smolagents 1.26.0 (`ToolCallingAgent`) demands a call (`"tool_choice": "required"`) and sends the stop strings "Observation:"
# and "Calling tools:" with it, which a server looks for in the arguments, too. A call that ended there is taken as it is:
# arguments that are no JSON become one text, so that {"answer": "The  is the answer of `run`, and the first argument of
# a tool, without an error. `OpenAIModel(..., stop=None)` sends none.
#
# Guessed before: no stop strings beside a demanded call, and an error for arguments that are no JSON. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/agent.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from smolagents import OpenAIModel, ToolCallingAgent, tool


class Server(BaseHTTPRequestHandler):
    calls = []

    def do_POST(self):
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, arguments = self.calls.pop(0)
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reply = {
            "id": "x", "object": "chat.completion", "created": 0, "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        reply = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


@tool
def note(text: str) -> str:
    """Keep a note.

    Args:
        text: the note
    """
    print(f"note: {text!r}")
    return "kept"


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for name, more, calls in (
    ("cut answer", {}, [("final_answer", '{"answer": "The ')]),
    ("cut note", {}, [("note", '{"text": "The '), ("final_answer", '{"answer": "done"}')]),
    ("stop=None", {"stop": None}, [("final_answer", '{"answer": "done"}')]),
):
    Server.calls = calls
    model = OpenAIModel("m", api_base=url, api_key="-", **more)
    agent = ToolCallingAgent([note], model, verbosity_level=0, max_steps=2)
    answer = agent.run("Hi")
    errors = [step.error for step in agent.memory.steps if getattr(step, "error", None)]
    print(f"{name}: {answer!r}", errors, server.asked["tool_choice"], server.asked.get("stop"))
PYTHON
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check smolagents==1.26.0 openai==3.57.0

seen=$("$python" -W ignore "$folder/agent.py" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
cut answer: '{"answer": "The ' [] required ['Observation:', 'Calling tools:']
note: '{"text": "The '
cut note: 'done' [] required ['Observation:', 'Calling tools:']
stop=None: 'done' [] required None
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
