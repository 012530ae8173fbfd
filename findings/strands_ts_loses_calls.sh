#!/usr/bin/env bash
# @strands-agents/sdk 1.16.0 for TypeScript (`OpenAIModel`, `api: "chat"`): of two calls of one answer, streamed as OpenAI streams them, the
# last one alone is run, and the history that goes to the model has no other, without an error. What the model said
# before a call is lost, too: the text is in no message and not in the next request. One call, and a text alone, are
# read as they are. (Strands 1.62.0 for Python runs both and keeps the text.)
#
# Guessed before: both calls, and the text. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" \
    @strands-agents/sdk@1.16.0 @modelcontextprotocol/sdk@1.32.2 @opentelemetry/api@1.10.0 \
    openai@6.49.0 zod@4.6.7
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import { Agent, tool } from "@strands-agents/sdk";
import { OpenAIModel } from "@strands-agents/sdk/models/openai";
import { z } from "zod";

let asked, deltas;
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    asked.push(JSON.parse(body));
    const first = asked.length === 1;
    const head = { id: "x", object: "chat.completion.chunk", created: 0, model: "m" };
    const line = (delta, finish_reason) => JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason }] });
    const said = first ? deltas : [{ role: "assistant", content: "Done." }];
    const lines = [...said.map((delta) => line(delta, null)), line({}, first ? "tool_calls" : "stop"), "[DONE]"];
    response.setHeader("Content-Type", "text/event-stream");
    response.end(lines.map((one) => `data: ${one}\n\n`).join(""));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const model = new OpenAIModel({ api: "chat", modelId: "m", apiKey: "-", clientConfig: { baseURL, maxRetries: 0 } });
const note = tool({
  name: "note",
  description: "Keep a note.",
  inputSchema: z.object({ n: z.number() }),
  callback: (values) => {
    console.log(`  called with ${JSON.stringify(values)}`);
    return "kept";
  },
});

const begun = (index) => ({
  tool_calls: [{ index, id: `c${index}`, type: "function", function: { name: "note", arguments: "" } }],
});
const more = (index, written) => ({ tool_calls: [{ index, function: { arguments: written } }] });
const one = [{ role: "assistant", content: null, ...begun(0) }, more(0, '{"n":'), more(0, " 1}")];
for (const [name, given] of [
  ["one call", one],
  ["two calls", [...one, begun(1), more(1, '{"n":'), more(1, " 2}")]],
  ["a text and a call", [{ role: "assistant", content: "Let me see." }, begun(0), ...one.slice(1)]],
]) {
  [asked, deltas] = [[], given];
  console.log(name);
  await new Agent({ model, tools: [note], printer: false }).invoke("Hi");
  const { content, tool_calls } = asked[1].messages.find(({ role }) => role === "assistant");
  console.log(`  sent back: text ${JSON.stringify(content)}, calls ${tool_calls.map(({ id }) => id).join(" ")}`);
}
process.exit(0);
JAVASCRIPT

seen=$(node "$folder/ask.mjs" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
one call
  called with {"n":1}
  sent back: text "", calls c0
two calls
  called with {"n":2}
  sent back: text "", calls c1
a text and a call
  called with {"n":1}
  sent back: text "", calls c0
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
