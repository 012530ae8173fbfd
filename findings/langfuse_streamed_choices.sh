#!/usr/bin/env bash
# langfuse 5.0.4 (`langfuse.openai`, which records what the openai package 3.57.0 sends and gets) writes the answers of a streamed request with
# `n: 2` into one text, piece by piece as they come: of "Yes, it is." and "No, it is not." the trace has "YesNo, it is., it is not."
# The finish reason is that of the choice which ends last, so that who looks for cut answers finds all or none. Whole, the two
# answers are a list, without a finish reason. The program itself gets both right.
#
# Guessed before: a list both times, or the first answer. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check langfuse==5.0.4 openai==3.57.0 opentelemetry-sdk==1.45.2

cat >"$folder/run.py" <<'PYTHON'
import http.server
import json
import logging
import os
import sys
import threading

logging.disable(logging.CRITICAL)
from langfuse import Langfuse
from langfuse.openai import OpenAI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PIECES = [(0, "Yes", None), (1, "No", None), (0, ", it is.", None), (1, ", it is not.", None), (0, "", "stop"), (1, "", "length")]


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        head = {"id": "x", "created": 0, "model": "m"}
        if asked.get("stream"):
            lines = [{"index": i, "delta": {"content": text}, "finish_reason": end} for i, text, end in PIECES]
            lines = [json.dumps({**head, "object": "chat.completion.chunk", "choices": [line]}) for line in lines]
            body, kind = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream"
        else:
            texts = ["".join(text for i, text, _ in PIECES if i == index) for index in (0, 1)]
            ends = ["stop", "length"]
            choices = [
                {"index": i, "message": {"role": "assistant", "content": texts[i]}, "finish_reason": ends[i]} for i in (0, 1)
            ]
            body, kind = json.dumps({**head, "object": "chat.completion", "choices": choices}), "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
Langfuse(public_key="-", secret_key="-", base_url="http://127.0.0.1:9", tracer_provider=provider)
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-")
for stream in (False, True):
    spans.clear()
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Is it?"}], n=2, stream=stream)
    if stream:
        list(answer)
    (span,) = spans.get_finished_spans()
    print(f"streamed {stream}: {span.attributes['langfuse.observation.output']}")
    print(f"  finish reason: {span.attributes.get('langfuse.observation.metadata.finish_reason')}")



sys.stdout.flush()
os._exit(0)  # not to wait for what cannot be sent
PYTHON

seen=$("$python" -W ignore "$folder/run.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
streamed False: [{"role": "assistant", "content": "Yes, it is."}, {"role": "assistant", "content": "No, it is not."}]
  finish reason: None
streamed True: YesNo, it is., it is not.
  finish reason: "length"
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
