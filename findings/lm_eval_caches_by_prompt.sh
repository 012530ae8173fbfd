#!/usr/bin/env bash
# lm-eval 0.4.13 (`--use_cache PATH`) keeps answers by the prompt and the task's own arguments: the model's name, the server's address and the
# model's arguments (`seed`, `eos_string`) are in no key. So who measures a second model with the same path gets the
# first one's answers, and its score, without a request or a warning. `--cache_requests` is another cache.
#
# Guessed before: the model's name is in the key. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/tasks"
printf '%s\n' '{"question": "2 + 2 =", "answer": "4"}' '{"question": "2 + 3 =", "answer": "5"}' >"$folder/sums.jsonl"
cat >"$folder/tasks/sums.yaml" <<YAML
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: $folder/sums.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\n"]
metric_list:
  - metric: exact_match
YAML
cat >"$folder/measure.py" <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import lm_eval
from lm_eval.tasks import TaskManager


class Server(BaseHTTPRequestHandler):
    asked = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body["model"])
        first, _, second, _ = body["messages"][-1]["content"].split()
        said = str(int(first) + int(second)) if body["model"] == "good" else "7"
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        reply["choices"] = [{"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]
        text = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


folder = sys.argv[1]
tasks = TaskManager(include_path=f"{folder}/tasks", include_defaults=False)
for name, cache in (("good", "one"), ("bad", "one"), ("bad", "two")):
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Server.asked = []
    url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    measured = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args={"model": name, "base_url": url, "tokenizer_backend": None},
        tasks=["sums"],
        task_manager=tasks,
        apply_chat_template=True,
        use_cache=f"{folder}/{cache}",
        bootstrap_iters=0,
    )
    score = measured["results"]["sums"]["exact_match,none"]
    print(f"{name}, cache {cache}: score {score}, {len(Server.asked)} requests", flush=True)
PYTHON
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check lm-eval[api]==0.4.13

seen=$(HF_HOME="$folder/home" HF_HUB_OFFLINE=1 "$python" -W ignore "$folder/measure.py" "$folder" 2>"$folder/errors") || tail -3 "$folder/errors" >&2
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
good, cache one: score 1.0, 2 requests
bad, cache one: score 1.0, 0 requests
bad, cache two: score 0.0, 2 requests
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
