#!/usr/bin/env bash
# @portkey-ai/gateway 1.15.2, with the provider "openai" and a server of one's own (`x-portkey-custom-host`), sends the fields alone that
# OpenAI has: `min_p`, `top_k`, `repetition_penalty`, `chat_template_kwargs`, `regex` and `ignore_eos` are gone, numbers are cut to
# OpenAI's bounds (a temperature of 2.5 is 2, `max_tokens` of -1, which means no bound elsewhere, is 0), without an error, a
# warning or a line in the answer. With the provider "together-ai" an answer ends at 128 tokens unasked, `seed` and `logit_bias` are gone,
# and `frequency_penalty` goes out as `repetition_penalty`: 0, which switches the first off, is 0 of a factor whose neutral value is 1.
#
# Guessed before: the body goes through as it is, since the host is one's own. Found 2026-12-01. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" @portkey-ai/gateway@1.15.2

cat >"$folder/run.mjs" <<'JAVASCRIPT'
import { spawn } from "node:child_process";
import http from "node:http";

let got;
const answer = {
  id: "x", object: "chat.completion", created: 1, model: "m",
  choices: [{ index: 0, message: { role: "assistant", content: "Hi" }, finish_reason: "stop" }],
  usage: { prompt_tokens: 3, completion_tokens: 1, total_tokens: 4 },
};
const server = http.createServer(async (request, response) => {
  let text = "";
  for await (const piece of request) text += piece;
  got = JSON.parse(text);
  response.setHeader("Content-Type", "application/json").end(JSON.stringify(answer));
});
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const host = `http://127.0.0.1:${server.address().port}/v1`;

const free = http.createServer();
await new Promise((done) => free.listen(0, "127.0.0.1", done));
const port = free.address().port;
await new Promise((done) => free.close(done));
const program = new URL("node_modules/@portkey-ai/gateway/build/start-server.js", import.meta.url).pathname;
const gateway = spawn("node", [program, "--headless", `--port=${port}`], { stdio: "ignore" });
for (let tries = 0; tries < 100; tries++) {
  if (await fetch(`http://127.0.0.1:${port}/`).then(() => true, () => false)) break;
  await new Promise((done) => setTimeout(done, 200));
}

async function show(provider, fields) {
  const asked = { model: "m", messages: [{ role: "user", content: "Hi" }], ...fields };
  const headers = { "Content-Type": "application/json", Authorization: "Bearer -" };
  headers["x-portkey-provider"] = provider;
  headers["x-portkey-custom-host"] = host;
  const url = `http://127.0.0.1:${port}/v1/chat/completions`;
  const reply = await fetch(url, { method: "POST", headers, body: JSON.stringify(asked) });
  const said = (await reply.json()).choices[0].message.content;
  const { model, messages, stream, ...sent } = got;
  console.log(`${provider}: ${JSON.stringify(fields)} -> ${JSON.stringify(sent)} (${reply.status}, ${said})`);
}
await show("openai", { temperature: 0, seed: 0, stop: ["."], logit_bias: { 1: 2 } });
await show("openai", { min_p: 0.1, top_k: 5, repetition_penalty: 1.1 });
await show("openai", { chat_template_kwargs: { enable_thinking: false }, regex: "a+", ignore_eos: true });
await show("openai", { temperature: 2.5, presence_penalty: 3, max_tokens: -1 });
await show("together-ai", { frequency_penalty: 0, presence_penalty: 0.5, seed: 7, logit_bias: { 1: 2 } });
gateway.kill();
server.close();
JAVASCRIPT

seen=$(node "$folder/run.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
openai: {"temperature":0,"seed":0,"stop":["."],"logit_bias":{"1":2}} -> {"temperature":0,"stop":["."],"logit_bias":{"1":2},"seed":0} (200, Hi)
openai: {"min_p":0.1,"top_k":5,"repetition_penalty":1.1} -> {} (200, Hi)
openai: {"chat_template_kwargs":{"enable_thinking":false},"regex":"a+","ignore_eos":true} -> {} (200, Hi)
openai: {"temperature":2.5,"presence_penalty":3,"max_tokens":-1} -> {"max_tokens":0,"temperature":2,"presence_penalty":2} (200, Hi)
together-ai: {"frequency_penalty":0,"presence_penalty":0.5,"seed":7,"logit_bias":{"1":2}} -> {"max_tokens":128,"repetition_penalty":0} (200, Hi)
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
