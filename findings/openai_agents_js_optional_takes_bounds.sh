#!/usr/bin/env bash
# @openai/agents 0.20.0, OpenAI's agents for JavaScript: one field of a tool, or of an `outputType`, that is optional, a
# tuple or a record takes from all other fields what they are beside their type. `z.int().min(1).max(9)` goes out as
# {"type": "number"}, and patterns are gone, with `strict: true` still beside them. A call with 2.5 fits what was sent,
# and its tool is not run: the model is told "An error occurred". `.nullish()` in the place of `.optional()` keeps all.
#
# Guessed before: each field goes out as it would alone. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" \
    @openai/agents@0.20.0 openai@6.49.0 zod@4.6.7
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import { Agent, run, setDefaultOpenAIClient, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

let asked;
const written = '{"n": 2.5, "code": "no code", "more": null}';
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    asked.push(JSON.parse(body));
    const call = { id: "c1", type: "function", function: { name: "note", arguments: written } };
    const said = asked.length > 1 ? { content: "Done." } : { content: null, tool_calls: [call] };
    const finish_reason = asked.length > 1 ? "stop" : "tool_calls";
    const choices = [{ index: 0, message: { role: "assistant", ...said }, finish_reason }];
    const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
    response.setHeader("Content-Type", "application/json");
    response.end(JSON.stringify({ id: "x", object: "chat.completion", created: 0, model: "m", choices, usage }));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
setTracingDisabled(true);
setOpenAIAPI("chat_completions");
setDefaultOpenAIClient(new OpenAI({ baseURL, apiKey: "-", maxRetries: 0 }));

const n = z.int().min(1).max(9);
const code = z.string().regex(/^[A-Z]{3}$/);
for (const [name, more] of [
  ["nullish", z.string().nullish()],
  ["optional", z.string().optional()],
  ["tuple", z.tuple([z.string(), z.boolean()])],
  ["record", z.record(z.string(), z.string())],
]) {
  asked = [];
  const note = tool({
    name: "note",
    description: "Keep a note.",
    parameters: z.object({ n, code, more }),
    execute: () => "kept",
  });
  await run(new Agent({ name: "a", model: "m", tools: [note] }), "Hi");
  const { parameters, strict } = asked[0].tools[0].function;
  console.log(`beside ${name}: n ${JSON.stringify(parameters.properties.n)}`);
  console.log(`  code ${JSON.stringify(parameters.properties.code)}, strict ${strict}`);
  if (name === "optional") console.log(`  ${written} -> ${asked[1].messages.at(-1).content}`);
}
for (const [name, more] of [["nullish", z.string().nullish()], ["optional", z.string().optional()]]) {
  asked = [];
  await run(new Agent({ name: "a", model: "m", outputType: z.object({ n, more }) }), "Hi").catch(() => {});
  const sent = asked[0]?.response_format.json_schema.schema.properties.n;
  console.log(`outputType, beside ${name}: n ${JSON.stringify(sent)}`);
}
process.exit(0);
JAVASCRIPT

seen=$(node "$folder/ask.mjs" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
beside nullish: n {"type":"integer","minimum":1,"maximum":9}
  code {"type":"string","pattern":"^[A-Z]{3}$"}, strict true
beside optional: n {"type":"number"}
  code {"type":"string"}, strict true
  {"n": 2.5, "code": "no code", "more": null} -> An error occurred while running the tool. Please try again.
beside tuple: n {"type":"number"}
  code {"type":"string"}, strict true
beside record: n {"type":"number"}
  code {"type":"string"}, strict true
outputType, beside nullish: n {"type":"integer","minimum":1,"maximum":9}
outputType, beside optional: n {"type":"number"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
