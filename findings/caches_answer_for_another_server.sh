#!/usr/bin/env bash
# Four caches of answers give out those of another server, which has a model of the same name: DSPy 3.4.1, whose cache on the disk
# is on unasked, LiteLLM 1.110.2 (`litellm.cache`), AutoGen 0.7.5 (`ChatCompletionCache`) and agno 3.1.10
# (`cache_response=True`). LiteLLM passes over what is in `extra_body`, as a `regex` or `chat_template_kwargs`, AutoGen
# over what its client was made with, and agno over all that is sampled with: an answer of temperature 0 is given for 0.9,
# one without a constraint for one with it. LangChain 1.5.2 (`set_llm_cache`) asks each time.
#
# Guessed before: the key of an answer has the address, and all that was sent. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check dspy==3.4.1 litellm==1.110.2 fastapi==0.165.0 orjson==3.13.0 soundfile==0.14.0 \
    autogen-ext[openai]==0.7.5 autogen-agentchat==0.7.5 agno==3.1.10 langchain-openai==1.7.4 openai==3.57.0 pydantic==2.14.4

seen=$(LITELLM_LOCAL_MODEL_COST_MAP=True DSPY_CACHEDIR="$folder/dspy" "$python" -W ignore - "$folder/agno" 2>/dev/null <<'PYTHON'
import asyncio
import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import dspy
import litellm
from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from autogen_core import InMemoryStore
from autogen_core.models import ModelInfo, UserMessage
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_openai import ChatOpenAI
from litellm.caching.caching import Cache


class Server(BaseHTTPRequestHandler):
    asked = 0

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Server.asked += 1
        message = {"role": "assistant", "content": f"answer {Server.asked}"}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        reply["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        reply["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        text = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def address():
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def by_dspy(url, **more):
    return dspy.LM("openai/m", api_base=url, api_key="-", **more)("Hi")


def by_litellm(url, **more):
    litellm.cache = litellm.cache or Cache(type="local")
    given = {"api_base": url, "api_key": "-", "messages": [{"role": "user", "content": "Hi"}], "caching": True}
    return litellm.completion(model="openai/m", **given, **more)


def by_autogen(url, **more):
    info = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")
    client = OpenAIChatCompletionClient(model="m", base_url=url, api_key="-", model_info=info, **more)
    return asyncio.run(ChatCompletionCache(client, store).create([UserMessage(content="Hi", source="user")]))


def by_agno(url, **more):
    model = OpenAILike(id="m", base_url=url, api_key="-", cache_response=True, cache_dir=sys.argv[1], **more)
    return Agent(model=model, telemetry=False).run("Hi")


def by_langchain(url, **more):
    return ChatOpenAI(model="m", base_url=url, api_key="-", **more).invoke("Hi")


logging.disable()
set_llm_cache(InMemoryCache())
store = InMemoryStore()
first, second = address(), address()
for ask in (by_dspy, by_litellm, by_autogen, by_agno, by_langchain):
    print(ask.__name__)
    for name, url, more in (
        ("first", first, {"temperature": 0}),
        ("again", first, {"temperature": 0}),
        ("another server", second, {"temperature": 0}),
        ("another temperature", first, {"temperature": 0.9}),
        ("a constraint", first, {"temperature": 0, "extra_body": {"regex": "yes|no"}}),
    ):
        if ask is by_autogen and "extra_body" in more:
            continue
        before = Server.asked
        ask(url, **more)
        print(f"  {name}:", "asked" if Server.asked > before else "from the cache")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
by_dspy
  first: asked
  again: from the cache
  another server: from the cache
  another temperature: asked
  a constraint: asked
by_litellm
  first: asked
  again: from the cache
  another server: from the cache
  another temperature: asked
  a constraint: from the cache
by_autogen
  first: asked
  again: from the cache
  another server: from the cache
  another temperature: from the cache
by_agno
  first: asked
  again: from the cache
  another server: from the cache
  another temperature: from the cache
  a constraint: from the cache
by_langchain
  first: asked
  again: from the cache
  another server: asked
  another temperature: asked
  a constraint: asked
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
