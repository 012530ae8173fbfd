#!/usr/bin/env bash
# opentelemetry-instrumentation-openai 0.62.4: of an answer of OpenAI's responses that `max_output_tokens` ended ("status": "incomplete") there
# is no span, so that the answers which cost most are missing from what a collector adds up. Its code has a
# finish reason for them, `length`, and the same answer has a span with it where it is streamed; so has a chat that
# `max_tokens` ended.
#
# Guessed before: a span with the reason. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q opentelemetry-instrumentation-openai==0.62.4 opentelemetry-sdk==1.45.2 openai==3.57.0
cat >"$folder/ask.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import OpenAI
from opentelemetry.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

USED = {"input_tokens": 7, "output_tokens": 5, "total_tokens": 12}
DETAILS = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
number = 0


def response(status):
    part = {"type": "output_text", "text": "Hello", "annotations": []}
    message = {"type": "message", "id": "m1", "role": "assistant", "status": status, "content": [part]}
    given = {"id": f"r{number}", "object": "response", "created_at": 1, "model": "m", "status": status}
    given |= {"output": [message], "usage": {**USED, **DETAILS}}
    given |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return given if status == "completed" else {**given, "incomplete_details": {"reason": "max_output_tokens"}}


def chat(reason):
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": reason}
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    given = {"id": f"c{number}", "created": 1, "model": "m", "usage": usage, "choices": [choice]}
    return {**given, "object": "chat.completion"}


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        global number
        number += 1
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cut = asked.get("max_output_tokens") or asked.get("max_tokens")
        if self.path.endswith("completions"):
            body, kind = json.dumps(chat("length" if cut else "stop")), "application/json"
        else:
            status = "incomplete" if cut else "completed"
            body, kind = json.dumps(response(status)), "application/json"
            if asked.get("stream"):
                event = {"type": f"response.{status}", "sequence_number": 0, "response": json.loads(body)}
                body, kind = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n", "text/event-stream"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
threading.Thread(target=server.serve_forever, daemon=True).start()
spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
OpenAIInstrumentor().instrument(tracer_provider=provider)
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="-", max_retries=0)


def ask_chat(**bound):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}], **bound)


def ask(**given):
    found = client.responses.create(model="m", input="Hi", **given)
    if given.get("stream"):
        list(found)


for name, call, given in (
    ("a chat", ask_chat, {}),
    ("a chat, cut", ask_chat, {"max_tokens": 5}),
    ("a response", ask, {}),
    ("a response, cut", ask, {"max_output_tokens": 5}),
    ("a response, streamed", ask, {"stream": True}),
    ("a response, cut and streamed", ask, {"max_output_tokens": 5, "stream": True}),
):
    spans.clear()
    call(**given)
    found = [span.attributes.get("gen_ai.response.finish_reasons") for span in spans.get_finished_spans()]
    print(f"{name}: {len(found)} spans, {found}")
PYTHON

seen=$("$folder/venv/bin/python" "$folder/ask.py" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
a chat: 1 spans, [('stop',)]
a chat, cut: 1 spans, [('length',)]
a response: 1 spans, [('stop',)]
a response, cut: 0 spans, []
a response, streamed: 1 spans, [('stop',)]
a response, cut and streamed: 1 spans, [('length',)]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
