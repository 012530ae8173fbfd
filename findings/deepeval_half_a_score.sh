#!/usr/bin/env bash
# deepeval 4.3.1 asks a server of one's own (`LocalModel`, and `GPTModel` with a model whose name it does not know) for JSON without a schema,
# and closes what comes: of {"reason": "right", "score": 1 where `max_tokens` ended a score of 10, `GEval` makes 0.1, without an
# error. A comma before "]" or "}" is taken out of texts, too: of "[1,]" a reason has "[1]". A score beyond the scale of
# 0 to 10 is one: 85 is 8.5 of 1. `GPTModel` with the name "gpt-4o" sends the schema to the same server (of `generate(schema=...)`), and
# raises LengthFinishReasonError for what was cut.
#
# Guessed before: `response_format`, or an error for what is no JSON, and for a score above 10. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check deepeval==4.3.1 openai==3.57.0 pydantic==2.14.4
export DEEPEVAL_TELEMETRY_OPT_OUT=YES
seen=$(cd "$folder" && "$folder/venv/bin/python" -W ignore - 2>"$folder/log" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from deepeval.metrics import GEval
from deepeval.models import GPTModel, LocalModel
from deepeval.test_case import LLMTestCase, LLMTestCaseParams
from pydantic import BaseModel

said, sent = "", {}


class Verdict(BaseModel):
    reason: str
    score: float


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        sent.clear()
        sent.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        ended = "stop" if said.endswith("}") else "length"
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": ended}
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
where = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "-", "temperature": 0}
models = {
    "LocalModel": LocalModel(model="m", **where),
    "GPTModel": GPTModel(model="m", cost_per_input_token=0, cost_per_output_token=0, **where),
    "GPTModel gpt-4o": GPTModel(model="gpt-4o", **where),
}
parameters = [LLMTestCaseParams.INPUT, LLMTestCaseParams.ACTUAL_OUTPUT]
for name, model in models.items():
    print(name)
    for said in ('{"reason": "right", "score": 1', '{"reason": "[1,]", "score": 5}'):
        try:
            told = repr(model.generate("Judge.", schema=Verdict)[0])
        except Exception as error:
            told = type(error).__name__
        print(f"  {said}: {told}, {'with' if 'response_format' in sent else 'without'} a schema")
    if name == "LocalModel":
        for said in ('{"reason": "right", "score": 1', '{"reason": "right", "score": 85}'):
            metric = GEval("Right", parameters, evaluation_steps=["Is it right?"], model=model, async_mode=False)
            metric.measure(LLMTestCase(input="1 + 1?", actual_output="2"), _show_indicator=False)
            print(f"  GEval of {said}: {metric.score}")
PYTHON
) || { cat "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
LocalModel
  {"reason": "right", "score": 1: Verdict(reason='right', score=1.0), without a schema
  {"reason": "[1,]", "score": 5}: Verdict(reason='[1]', score=5.0), without a schema
  GEval of {"reason": "right", "score": 1: 0.1
  GEval of {"reason": "right", "score": 85}: 8.5
GPTModel
  {"reason": "right", "score": 1: Verdict(reason='right', score=1.0), without a schema
  {"reason": "[1,]", "score": 5}: Verdict(reason='[1]', score=5.0), without a schema
GPTModel gpt-4o
  {"reason": "right", "score": 1: LengthFinishReasonError, with a schema
  {"reason": "[1,]", "score": 5}: Verdict(reason='[1,]', score=5.0), with a schema
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
