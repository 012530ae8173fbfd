#!/usr/bin/env bash
# Two frameworks run a call of a tool whose arguments end in the middle, at the answer's `max_tokens` (`finish_reason` "length"):
# of {"amount": 12 where 1250 was to come, the tool is called with 12, without an error or a warning.
#
# - LangChain 1.5.2 (core 1.8.3, openai 1.7.4): a whole answer's cut call is in `invalid_tool_calls`; of the same answer in pieces,
#   `tool_calls` has 12, and an agent (`create_agent`) that is streamed (`stream_mode="messages"`) runs it.
#   `ChatOpenAI(..., disable_streaming="tool_calling")` asks for whole answers.
# - llama-index 0.14.25 (openai-like 0.8.1, `FunctionAgent`): whole and streamed, it runs.
#
# Guessed before: an error, or an invalid call, both times. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/cut.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

CUT = '{"amount": 12'


def pay(amount: int) -> str:
    """Pay so much."""
    print(f"  pay({amount!r})", flush=True)
    return "paid"


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        done = any(message["role"] == "tool" for message in asked["messages"])
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "pay", "arguments": CUT}}
        said = {"content": "Done"} if done else {"content": None, "tool_calls": [call]}
        message = {"role": "assistant", **said}
        end = "stop" if done else "length"
        head = {"id": "x", "created": 0, "model": "m"}
        self.send_response(200)
        if not asked.get("stream"):
            reply = {**head, "object": "chat.completion"}
            reply["choices"] = [{"index": 0, "message": message, "finish_reason": end}]
            reply["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            return self.send(json.dumps(reply), "application/json")
        head["object"] = "chat.completion.chunk"
        pieces = [{**message}, {}]
        if not done:
            begin = {**call, "function": {"name": "pay", "arguments": CUT[:5]}}
            rest = {"index": 0, "function": {"arguments": CUT[5:]}}
            pieces = [{"role": "assistant", "tool_calls": [begin]}, {"tool_calls": [rest]}]
        ends = (None, end)
        chunks = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": ends[number]}]}
            for number, delta in enumerate(pieces)
        ]
        lines = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
        self.send("".join(f"data: {line}\n\n" for line in lines), "text/event-stream")

    def send(self, text, kind):
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
PYTHON
cat >"$folder/langchain_cut.py" <<'PYTHON'
from cut import pay, url
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

given = {"model": "m", "base_url": url, "api_key": "-"}
model = ChatOpenAI(**given).bind_tools([tool(pay)])
whole = model.invoke("Pay 1250.")
print("langchain, whole:", len(whole.tool_calls), "calls,", len(whole.invalid_tool_calls), "invalid", flush=True)
streamed = None
for piece in model.stream("Pay 1250."):
    streamed = piece if streamed is None else streamed + piece
calls = [call["args"] for call in streamed.tool_calls]
print("langchain, streamed:", calls, len(streamed.invalid_tool_calls), "invalid", flush=True)
asked = {"messages": [("user", "Pay 1250.")]}
print("agent, whole", flush=True)
create_agent(ChatOpenAI(**given), [tool(pay)]).invoke(asked)
print("agent, streamed", flush=True)
list(create_agent(ChatOpenAI(**given), [tool(pay)]).stream(asked, stream_mode="messages"))
print("agent, streamed, disable_streaming", flush=True)
model = ChatOpenAI(**given, disable_streaming="tool_calling")
list(create_agent(model, [tool(pay)]).stream(asked, stream_mode="messages"))
PYTHON
cat >"$folder/llama_index_cut.py" <<'PYTHON'
import asyncio

import tiktoken

ranks = {bytes([byte]): byte for byte in range(256)}
encoding = tiktoken.Encoding("bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
tiktoken.get_encoding = tiktoken.encoding_for_model = lambda *_: encoding

from cut import pay, url
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(model="m", api_base=url, api_key="-", is_chat_model=True, is_function_calling_model=True)


async def run():
    for streaming in (False, True):
        print("llama-index,", "streamed" if streaming else "whole", flush=True)
        await FunctionAgent(llm=model, tools=[FunctionTool.from_defaults(pay)], streaming=streaming).run("Pay 1250.")


asyncio.run(run())
PYTHON

python3 -m venv "$folder/langchain"
"$folder/langchain/bin/python" -m pip install --quiet --disable-pip-version-check \
  langchain==1.5.2 langchain-core==1.8.3 langchain-openai==1.7.4 langgraph==1.2.24 openai==3.57.0
python3 -m venv "$folder/llama"
"$folder/llama/bin/python" -m pip install --quiet --disable-pip-version-check \
  llama-index-core==0.14.25 llama-index-llms-openai==0.8.3 llama-index-llms-openai-like==0.8.1 openai==2.54.0 tiktoken==0.14.0
cd "$folder"
seen=$("$folder/langchain/bin/python" -W ignore langchain_cut.py 2>/dev/null
  "$folder/llama/bin/python" -W ignore llama_index_cut.py 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
langchain, whole: 0 calls, 1 invalid
langchain, streamed: [{'amount': 12}] 0 invalid
agent, whole
agent, streamed
  pay(12)
agent, streamed, disable_streaming
llama-index, whole
  pay(12)
llama-index, streamed
  pay(12)
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
