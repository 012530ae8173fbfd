#!/usr/bin/env bash
# @langchain/openai 1.6.0 for JavaScript with `useResponsesApi: true`: of a tool choice "required", "any", "none" or "auto" nothing is
# sent; the name of a tool, or a function, is. So a model may call tools that "none" forbids, and an agent's
# `responseFormat` (langchain 1.5.14), which is a tool that has to be called, is undefined where the model answers with a
# text, without an error. Nor are `stop` and `logprobs` sent. To OpenAI's chats all of them go.
#
# Guessed before: the choice is sent to both. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" \
    @langchain/core@1.4.0 @langchain/langgraph@1.7.3 @langchain/openai@1.6.0 langchain@1.5.14 openai@6.49.0 zod@4.6.7
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, toolStrategy } from "langchain";
import { z } from "zod";

let asked;
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    asked.push(JSON.parse(body));
    const head = { id: "x", model: "m", created: 0, created_at: 0 };
    const part = { type: "output_text", text: "It is three.", annotations: [] };
    const output = [{ type: "message", id: "y", role: "assistant", status: "completed", content: [part] }];
    const choices = [{ index: 0, message: { role: "assistant", content: part.text }, finish_reason: "stop" }];
    const reply = request.url.endsWith("responses")
      ? { ...head, object: "response", status: "completed", output, output_text: part.text }
      : { ...head, object: "chat.completion", choices };
    response.setHeader("Content-Type", "application/json");
    response.end(JSON.stringify(reply));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const fields = { name: "note", description: "Keep a note.", schema: z.object({ n: z.int() }) };
const note = tool(() => "kept", fields);
const named = { type: "function", function: { name: "note" } };

for (const useResponsesApi of [false, true]) {
  const given = { model: "m", apiKey: "-", maxRetries: 0, useResponsesApi, configuration: { baseURL } };
  const model = new ChatOpenAI({ ...given, stop: ["."], logprobs: true, topLogprobs: 2 });
  console.log(useResponsesApi ? "responses" : "chats");
  for (const tool_choice of ["auto", "none", "any", "required", "note", named]) {
    asked = [];
    await model.bindTools([note], { tool_choice }).invoke("Hi");
    console.log(`  ${JSON.stringify(tool_choice)} is sent as ${JSON.stringify(asked[0].tool_choice)}`);
  }
  console.log(`  stop ${JSON.stringify(asked[0].stop)}, top_logprobs ${asked[0].top_logprobs}`);
}
asked = [];
const model = new ChatOpenAI({ model: "m", apiKey: "-", useResponsesApi: true, configuration: { baseURL } });
const agent = createAgent({ model, tools: [note], responseFormat: toolStrategy(z.object({ sum: z.int() })) });
const { structuredResponse } = await agent.invoke({ messages: [{ role: "user", content: "Hi" }] });
console.log(`an agent sends ${asked[0].tool_choice} and has ${structuredResponse}`);
process.exit(0);
JAVASCRIPT

seen=$(node "$folder/ask.mjs" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
chats
  "auto" is sent as "auto"
  "none" is sent as "none"
  "any" is sent as "required"
  "required" is sent as "required"
  "note" is sent as {"type":"function","function":{"name":"note"}}
  {"type":"function","function":{"name":"note"}} is sent as {"type":"function","function":{"name":"note"}}
  stop ["."], top_logprobs 2
responses
  "auto" is sent as undefined
  "none" is sent as undefined
  "any" is sent as undefined
  "required" is sent as undefined
  "note" is sent as {"type":"function","name":"note"}
  {"type":"function","function":{"name":"note"}} is sent as {"type":"function","name":"note"}
  stop undefined, top_logprobs undefined
an agent sends undefined and has undefined
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
