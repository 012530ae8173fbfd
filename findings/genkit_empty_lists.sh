#!/usr/bin/env bash
# genkit 1.42.0 for JavaScript with @genkit-ai/compat-oai 1.42.0 (`openAICompatible`): of the answer [1, 2, 3], or ["a", "b"], `output` is [] where
# `format: "array"` was asked for, without an error: objects are found in it, and nothing else. An answer that
# `max_tokens` ended is completed: {"amount": 12 where 1250 was to come is 12. And of a request's `config`,
# `temperature: 0`, `seed: 0`, `maxOutputTokens` and `topK` are not sent, nor is the schema, but in the prompt.
# `max_tokens` and `top_k` are sent as they are. `format: "json"` reads the lists.
#
# Guessed before: the list, an error, and all of them sent. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" \
    genkit@1.42.0 @genkit-ai/compat-oai@1.42.0
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import { openAICompatible } from "@genkit-ai/compat-oai";
import { genkit, z } from "genkit";

let answer, asked;
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    asked = JSON.parse(body);
    const reply = { id: "x", object: "chat.completion", created: 0, model: "m" };
    const message = { role: "assistant", content: answer };
    const finish_reason = "]}".includes(answer.at(-1)) ? "stop" : "length";
    reply.choices = [{ index: 0, message, finish_reason }];
    reply.usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
    response.setHeader("Content-Type", "application/json");
    response.end(JSON.stringify(reply));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const ai = genkit({ plugins: [openAICompatible({ name: "own", apiKey: "-", baseURL })] });

const numbers = z.array(z.number());
const objects = z.array(z.object({ n: z.number() }));
const order = z.object({ amount: z.number() });
for (const [format, schema, said] of [
  ["array", numbers, "[1, 2, 3]"],
  ["array", z.array(z.string()), '["a", "b"]'],
  ["array", objects, '[{"n": 1}, {"n": 2}]'],
  ["json", numbers, "[1, 2, 3]"],
  ["json", order, '{"amount": 12'],
]) {
  answer = said;
  const { output } = await ai.generate({ model: "own/m", prompt: "Hi", output: { format, schema } });
  console.log(format, answer, "->", JSON.stringify(output));
}
console.log("beside the messages:", Object.keys(asked).filter((key) => key !== "messages").join(" "));
for (const config of [
  { temperature: 0 },
  { temperature: 0.5 },
  { seed: 0 },
  { maxOutputTokens: 5 },
  { max_tokens: 5 },
  { topK: 4 },
  { top_k: 4 },
]) {
  await ai.generate({ model: "own/m", prompt: "Hi", config });
  const { model, messages, ...sent } = asked;
  console.log(JSON.stringify(config), "is sent as", JSON.stringify(sent));
}
process.exit(0);
JAVASCRIPT

seen=$(node "$folder/ask.mjs" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
array [1, 2, 3] -> []
array ["a", "b"] -> []
array [{"n": 1}, {"n": 2}] -> [{"n":1},{"n":2}]
json [1, 2, 3] -> [1,2,3]
json {"amount": 12 -> {"amount":12}
beside the messages: model
{"temperature":0} is sent as {}
{"temperature":0.5} is sent as {"temperature":0.5}
{"seed":0} is sent as {}
{"maxOutputTokens":5} is sent as {}
{"max_tokens":5} is sent as {"max_tokens":5}
{"topK":4} is sent as {}
{"top_k":4} is sent as {"top_k":4}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
