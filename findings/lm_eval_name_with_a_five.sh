#!/usr/bin/env bash
# lm-eval 0.4.13 (`openai-chat-completions`, also with the `base_url` of another server) looks for "5", "o1", "o3" and "o4"
# anywhere in the name of the model: of "qwen2.5-0.5b" it sends no stop strings and a temperature of 1, where the task says 0,
# as if it were one of OpenAI's that refuse others, without a word. So a greedy task is sampled. Both classes for chats send
# the first four of a task's stop strings, and cut the answer at none of the rest. `local-chat-completions` sends the
# temperature, whatever the name.
#
# Guessed before: temperature 0 and all stop strings, whatever the name. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check lm-eval[api]==0.4.13 tiktoken==0.14.0

seen=$(OPENAI_API_KEY=- HF_HUB_OFFLINE=1 "$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, OpenAIChatCompletion

STOP = ["Q1:", "Q2:", "Q3:", "Q4:", "Q5:"]
asked = []


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": "yes Q5: and more"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        text = json.dumps({"id": "x", "object": "chat.completion", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
chat = JsonChatStr(json.dumps([{"role": "user", "content": "Hi"}]))
for kind in (OpenAIChatCompletion, LocalChatCompletion):
    for model in ("smollm2", "qwen2.5-0.5b"):
        given = {"until": list(STOP), "temperature": 0, "max_gen_toks": 8}
        task = Instance("generate_until", {}, (chat, given), 0)
        (read,) = kind(model=model, base_url=url, eos_string="</s>").generate_until([task], disable_tqdm=True)
        sent = asked.pop()
        print(kind.__name__, model, sent["temperature"], sent.get("stop"), repr(read))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
OpenAIChatCompletion smollm2 0 ['Q1:', 'Q2:', 'Q3:', 'Q4:'] 'yes Q5: and more'
OpenAIChatCompletion qwen2.5-0.5b 1 None 'yes Q5: and more'
LocalChatCompletion smollm2 0 ['Q1:', 'Q2:', 'Q3:', 'Q4:'] 'yes Q5: and more'
LocalChatCompletion qwen2.5-0.5b 0 ['Q1:', 'Q2:', 'Q3:', 'Q4:'] 'yes Q5: and more'
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
