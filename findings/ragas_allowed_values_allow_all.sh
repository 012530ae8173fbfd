#!/usr/bin/env bash
# ragas 0.4.3: the `allowed_values` of a `NumericMetric` hold nothing. Of (0, 1), or range(1, 6), a judge's 85 and -3 are scores, and raise or
# lower a mean; neither bound is sent, and none is checked. A `RankingMetric` of three takes a list of one. A `DiscreteMetric`
# asks again for what is not allowed, and raises an error at last. The judge is asked for `json_object`, whatever the metric, the schema
# is in the prompt. (langchain-community 0.3.31: ragas 0.4.3 cannot be imported with 0.4.2.)
#
# Guessed before: the bounds are in a schema, or what is beyond them is asked for again. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/uv"
"$folder/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9
"$folder/uv/bin/uv" venv --quiet --python "$(command -v python3)" "$folder/venv"
"$folder/uv/bin/uv" pip install --quiet --python "$folder/venv/bin/python" \
  ragas==0.4.3 langchain-community==0.3.31 langchain-core==1.8.3 openai==3.3.0 instructor==1.17.0 pydantic==2.14.4
export RAGAS_DO_NOT_TRACK=true
seen=$(cd "$folder" && "$folder/venv/bin/python" -W ignore - 2>"$folder/log" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from openai import OpenAI
from ragas.llms import llm_factory
from ragas.metrics import DiscreteMetric, NumericMetric, RankingMetric

said, asked = None, []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": json.dumps({"reason": "", "value": said})}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
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
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-", max_retries=0)
judge = llm_factory("m", client=client)
for metric, allowed, values in (
    (NumericMetric, (0, 1), (0.5, 85, -3)),
    (NumericMetric, range(1, 6), (0.5, 85)),
    (RankingMetric, 3, (["a", "b", "c"], ["a"])),
    (DiscreteMetric, ["good", "bad"], ("good", "fair")),
):
    print(metric.__name__, allowed)
    for said in values:
        asked.clear()
        try:
            told = metric(name="m", allowed_values=allowed, prompt="Judge {response}.").score(llm=judge, response="It is.").value
        except Exception as error:
            told = type(error).__name__
        print(f"  {said}: {told}, asked as {asked[0]['response_format']['type']}")
        assert "maximum" not in json.dumps(asked)
PYTHON
) || { cat "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
NumericMetric (0, 1)
  0.5: 0.5, asked as json_object
  85: 85.0, asked as json_object
  -3: -3.0, asked as json_object
NumericMetric range(1, 6)
  0.5: 0.5, asked as json_object
  85: 85.0, asked as json_object
RankingMetric 3
  ['a', 'b', 'c']: ['a', 'b', 'c'], asked as json_object
  ['a']: ['a'], asked as json_object
DiscreteMetric ['good', 'bad']
  good: good, asked as json_object
  fair: InstructorRetryException, asked as json_object
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
