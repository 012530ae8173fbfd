#!/usr/bin/env bash
# Two load generators tell of one stream other figures by the same names. Of an answer with 6 tokens in 4 pieces (so says its `usage`),
# the first of which comes late, guidellm 0.8.1 tells 6 tokens, and as time per output token the whole request's time by 6,
# the wait for the first token in it. aiperf 0.13.0 tells as many tokens as the tokenizer that it was given makes of the text,
# and the time behind the first one by these. Of a streamed tool call it counts the arguments alone: a call of 6 tokens in 5 pieces
# is one token, and there is no time between tokens. With `--use-server-token-count` aiperf tells 6 as well. Both leave the
# first, empty piece with the role out of the time to the first token.
#
# Guessed before: the tokens of `usage` in both, and a time per output token behind the first one. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
bin="$folder/venv/bin"
"$bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 guidellm==0.8.1 aiperf==0.13.0
cat >"$folder/server.py" <<'PYTHON'
import asyncio
import json
import sys

from aiohttp import web


async def chat(request):
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)

    async def send(choices, **more):
        chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
        await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def choice(delta, finish=None):
        return [{"index": 0, "delta": delta, "finish_reason": finish}]

    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": ""}}
    pieces = {
        "text": [{"content": text} for text in ("red ", "green ", "red ", "green")],
        "call": [{"tool_calls": [{"index": 0, **call}]}]
        + [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in ("re", "d", "re", "d")],
    }[sys.argv[1]]
    await send(choice({"role": "assistant", "content": ""}))
    await asyncio.sleep(0.5)
    for piece in pieces:
        await asyncio.sleep(0.1)
        await send(choice(piece))
    await send(choice({}, "tool_calls" if sys.argv[1] == "call" else "stop"))
    await send([], usage={"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11})
    await reply.write(b"data: [DONE]\n\n")
    return reply


async def models(_):
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


app = web.Application()
app.router.add_post("/v1/chat/completions", chat)
app.router.add_get("/v1/models", models)
app.router.add_get("/health", models)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
PYTHON
mkdir -p "$folder/words/words"
"$bin/python" - "$folder/words/words" <<'PYTHON'
import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<unk>": 0, "red": 1, "green": 2, "redred": 3}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(sys.argv[1])
PYTHON
cd "$folder/words"
for kind in text call; do
  port=$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  "$bin/python" "$folder/server.py" $kind "$port" &
  sleep 3
  timeout 300 "$bin/guidellm" run --backend kind=openai_http,target=http://127.0.0.1:"$port",model=m --profile kind=synchronous \
    --constraint kind=max_requests,count=1 --data kind=synthetic_text,prompt_tokens=5,output_tokens=6 \
    --tokenizer kind=huggingface_auto,model="$folder/words/words" --disable-console --output kind=json,path="$folder/guidellm_$kind.json" \
    >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
  for counted in own server; do
    timeout 300 "$bin/aiperf" profile --model m --url http://127.0.0.1:"$port" --endpoint-type chat --streaming --tokenizer words/../words \
      --concurrency 1 --request-count 1 --synthetic-input-tokens-mean 5 --output-tokens-mean 6 --ui none \
      --output-artifact-dir "$folder/aiperf_${kind}_$counted" $([ $counted = own ] || echo --use-server-token-count) \
      >"$folder/log" 2>&1 || { tail -40 "$folder/log"; exit 1; }
  done
done
"$bin/python" - "$folder" <<'PYTHON'
import json
import sys

folder = sys.argv[1]


def guidellm(kind):
    (benchmark,) = json.load(open(f"{folder}/guidellm_{kind}.json"))["benchmarks"]
    (one,) = benchmark["requests"]["successful"]
    return one


def aiperf(kind, counted, name):
    found = json.load(open(f"{folder}/aiperf_{kind}_{counted}/profile_export_aiperf.json")).get(name)
    return None if found is None else found["avg"]


seen = {}
for kind in ("text", "call"):
    one = guidellm(kind)
    whole = one["request_latency"] * 1000
    wait, each = one["time_to_first_token_ms"], one["time_per_output_token_ms"]
    print(f"{kind}: guidellm {one['output_tokens']} tokens, {whole:.0f} ms, first after {wait:.0f}, each {each:.0f}")
    seen[kind, "guidellm"] = (one["output_tokens"], abs(each * 6 / whole - 1) < 0.01, wait > 500)
    for counted in ("own", "server"):
        names = ("output_sequence_length", "time_to_first_token", "inter_token_latency")
        count, first, between = (aiperf(kind, counted, name) for name in names)
        print(f"{kind}: aiperf ({counted} counts) {count} tokens, first after {first}, each {between}")
        seen[kind, counted] = (count, between is not None)
expected = {
    ("text", "guidellm"): (6, True, True),
    ("text", "own"): (4.0, True),
    ("text", "server"): (6.0, True),
    ("call", "guidellm"): (6, True, True),
    ("call", "own"): (1.0, False),
    ("call", "server"): (6.0, True),
}
print("as described" if seen == expected else f"changed: {seen}")
sys.exit(seen != expected)
PYTHON
