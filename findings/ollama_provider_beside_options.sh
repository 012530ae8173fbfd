#!/usr/bin/env bash
# ollama-ai-provider-v2 4.0.1, a provider of Vercel's `ai` 7.0.173 for Ollama: `temperature`, `topP` and `maxOutputTokens` stand
# beside `options` in what is sent, and a `toolChoice`, too. Ollama's `/api/chat` has no such fields: ollama 0.6.4, its own client, has
# the first in `options` and calls the last of them `num_predict`. So Ollama samples at a temperature of its own, and no
# answer is bounded, without a warning. Of `topK`, `seed` and `stopSequences` nothing is sent, with a warning each.
# What `providerOptions.ollama.options` has goes where it is read.
#
# Guessed before: they are sent as `options`. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" \
    ai@7.0.173 ollama-ai-provider-v2@4.0.1 ollama@0.6.4 zod@4.6.7
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import { generateText, tool } from "ai";
import { Ollama } from "ollama";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
let asked;
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    asked = JSON.parse(body);
    const message = { role: "assistant", content: "Hello." };
    response.setHeader("Content-Type", "application/json");
    response.end(JSON.stringify({ model: "m", created_at: "2026-11-30T12:00:00Z", message, done: true, done_reason: "stop" }));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const url = `http://127.0.0.1:${server.address().port}`;
const model = createOllama({ baseURL: `${url}/api` })("m");
const show = (name, more = "") => {
  const { model, messages, stream, think, tools, ...sent } = asked;
  console.log(`${name} is sent as ${JSON.stringify(sent)}${more}`);
};
const note = tool({ description: "Keep a note.", inputSchema: z.object({ n: z.number() }) });
for (const given of [
  { temperature: 0 },
  { topP: 0.5 },
  { maxOutputTokens: 5 },
  { topK: 4, seed: 1, stopSequences: ["."] },
  { toolChoice: "auto", tools: { note } },
  { providerOptions: { ollama: { options: { temperature: 0, num_predict: 5 } } } },
]) {
  const { warnings } = await generateText({ model, prompt: "Hi", maxRetries: 0, ...given });
  show(Object.keys(given).join(", "), `, with ${warnings.length} warnings`);
}
await new Ollama({ host: url }).chat({
  model: "m",
  messages: [{ role: "user", content: "Hi" }],
  options: { temperature: 0, num_predict: 5 },
});
show("ollama's own");
process.exit(0);
JAVASCRIPT

seen=$(node "$folder/ask.mjs" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
temperature is sent as {"temperature":0}, with 0 warnings
topP is sent as {"top_p":0.5}, with 0 warnings
maxOutputTokens is sent as {"max_output_tokens":5}, with 0 warnings
topK, seed, stopSequences is sent as {}, with 3 warnings
toolChoice, tools is sent as {"tool_choice":"auto"}, with 0 warnings
providerOptions is sent as {"options":{"temperature":0,"num_predict":5}}, with 0 warnings
ollama's own is sent as {"options":{"temperature":0,"num_predict":5}}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
