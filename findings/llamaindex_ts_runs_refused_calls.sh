#!/usr/bin/env bash
# llamaindex 0.12.1 for TypeScript (@llamaindex/openai 0.4.22, @llamaindex/workflow 1.1.24, `agent`) runs a tool with arguments that its own
# zod schema refuses: `n` is "12", a text, or 120 where 50 is the most; the ZodError is printed, and the call goes on. Of
# two calls in one piece of a stream the second is lost, without an error. And what the model is sent of a tool's
# result has lost all its quotes: of {"code": "12", "said": "\"no\""} it reads code: 12 and said: \no\.
#
# Guessed before: an error to the model, two calls, and the result as JSON. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" \
    llamaindex@0.12.1 @llamaindex/openai@0.4.22 @llamaindex/workflow@1.1.24 zod@4.6.7
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import { OpenAI } from "@llamaindex/openai";
import { agent } from "@llamaindex/workflow";
import { tool } from "llamaindex";
import { z } from "zod";

let asked, pieces;
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    asked.push(JSON.parse(body));
    const head = { id: "x", object: "chat.completion.chunk", created: 0, model: "m" };
    const said = asked.length === 1 ? pieces.map((calls) => ({ role: "assistant", tool_calls: calls })) : [{ content: "Done." }];
    const line = (delta, finish_reason) => JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason }] });
    const lines = [...said.map((delta) => line(delta, null)), line({}, asked.length === 1 ? "tool_calls" : "stop"), "[DONE]"];
    response.setHeader("Content-Type", "text/event-stream");
    response.end(lines.map((one) => `data: ${one}\n\n`).join(""));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
console.error = () => {};
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const llm = new OpenAI({ model: "m", apiKey: "-", baseURL, maxRetries: 0 });
const call = (index, values) => {
  const written = { name: "note", arguments: JSON.stringify(values) };
  return { index, id: `c${index}`, type: "function", function: written };
};
const note = tool({
  name: "note",
  description: "Keep a note.",
  parameters: z.object({ n: z.number().max(50) }),
  execute: async (values) => {
    process.stdout.write(`  called with ${JSON.stringify(values)}\n`);
    return { code: "12", said: '"no"' };
  },
});

for (const [name, given] of [
  ["a text for a number", [[call(0, { n: "12" })]]],
  ["more than the most", [[call(0, { n: 120 })]]],
  ["two calls in two pieces", [[call(0, { n: 1 })], [call(1, { n: 2 })]]],
  ["two calls in one piece", [[call(0, { n: 1 }), call(1, { n: 2 })]]],
]) {
  [asked, pieces] = [[], given];
  process.stdout.write(`${name}\n`);
  await agent({ llm, tools: [note] }).run("Hi");
}
process.stdout.write(`result: ${asked[1].messages.at(-1).content.replace(/\s+/g, " ")}\n`);
process.exit(0);
JAVASCRIPT

seen=$(node "$folder/ask.mjs" 2>/dev/null | grep -E '^[a-z]|^  called')
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
a text for a number
  called with {"n":"12"}
more than the most
  called with {"n":120}
two calls in two pieces
  called with {"n":1}
  called with {"n":2}
two calls in one piece
  called with {"n":1}
result: { code: 12, said: \no\ }
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
