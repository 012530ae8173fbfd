#!/usr/bin/env bash
# baml-py 0.226.3 sends no schema of a function's result to a server (`openai-generic`) and reads the answer leniently: for
# `int[]` the answer "1,2,3" is [123], "1, 2" is [], and what is no integer is left out of a list (["1", "x"] is [1]); for
# `int` "2.5" is 3 and "[1, 2]" is 1; for `float` "1,5" is 15.0; for `bool` "not true" is True. None is an error.
# `response_format` among the client's options is sent as it stands, so that a server can hold the schema.
#
# Guessed before: [1, 2, 3] and [1, 2], or errors. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check baml-py==0.226.3 pydantic==2.14.4
mkdir "$folder/baml_src"
cat >"$folder/baml_src/main.baml" <<'BAML'
generator target {
  output_type "python/pydantic"
  output_dir "../"
  version "0.226.3"
  default_client_mode "sync"
}
client<llm> Local {
  provider "openai-generic"
  options {
    base_url env.SERVER
    api_key "-"
    model "m"
  }
}
client<llm> Held {
  provider "openai-generic"
  options {
    base_url env.SERVER
    api_key "-"
    model "m"
    response_format {
      type "json_object"
    }
  }
}
function Numbers(asked: string) -> int[] {
  client Local
  prompt #"{{ asked }}"#
}
function Count(asked: string) -> int {
  client Local
  prompt #"{{ asked }}"#
}
function Price(asked: string) -> float {
  client Local
  prompt #"{{ asked }}"#
}
function Truth(asked: string) -> bool {
  client Held
  prompt #"{{ asked }}"#
}
BAML
(cd "$folder" && venv/bin/baml-cli generate) >/dev/null 2>&1
cat >"$folder/ask.py" <<'PYTHON'
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class Server(BaseHTTPRequestHandler):
    text = ""

    def do_POST(self):
        self.server.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": self.text}
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


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ.update(SERVER=f"http://127.0.0.1:{server.server_port}/v1", BAML_LOG="off")
from baml_client import b

for function, texts in (
    (b.Numbers, ["[1, 2]", "1,2,3", "1, 2", '["1", "x"]', "[1.5, 2.5]"]),
    (b.Count, ["5", "2.5", "[1, 2]"]),
    (b.Price, ["1.5", "1,5"]),
    (b.Truth, ["true", "not true"]),
):
    for Server.text in texts:
        print(function.__name__, Server.text, "->", function("Hi"))
    print(" ", sorted(server.asked), server.asked.get("response_format"))
PYTHON

seen=$(cd "$folder" && "$python" -W ignore ask.py 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Numbers [1, 2] -> [1, 2]
Numbers 1,2,3 -> [123]
Numbers 1, 2 -> []
Numbers ["1", "x"] -> [1]
Numbers [1.5, 2.5] -> [2, 3]
  ['messages', 'model'] None
Count 5 -> 5
Count 2.5 -> 3
Count [1, 2] -> 1
  ['messages', 'model'] None
Price 1.5 -> 1.5
Price 1,5 -> 15.0
  ['messages', 'model'] None
Truth true -> True
Truth not true -> True
  ['messages', 'model', 'response_format'] {'type': 'json_object'}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
