#!/usr/bin/env bash
# @mastra/core 1.71.0: a list that an agent is asked for (`structuredOutput: {schema: z.array(...).min(2).max(3)}`) goes out as
# {"elements": [...]} whose schema has neither bound, and a tuple as one of any length. What the schema that was sent
# admits is then refused by zod. The same list as a field of an object keeps its bounds. And `z.date()` goes out as a
# text with "format": "date-time" and is refused whatever comes: a text is no date. `z.coerce.date()` reads it.
#
# Guessed before: what is sent has the bounds, and what fits it is read. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" @mastra/core@1.71.0 zod@4.6.7
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import { Agent } from "@mastra/core/agent";
import { z } from "zod";

let answer, asked;
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    asked = JSON.parse(body).response_format.json_schema.schema;
    const choices = [{ index: 0, message: { role: "assistant", content: answer }, finish_reason: "stop" }];
    const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
    response.setHeader("Content-Type", "application/json");
    response.end(JSON.stringify({ id: "x", object: "chat.completion", created: 0, model: "m", choices, usage }));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const url = `http://127.0.0.1:${server.address().port}/v1`;
const agent = new Agent({ id: "a", name: "a", instructions: "Help.", model: { id: "own/m", url, apiKey: "-" } });

const texts = z.array(z.string()).min(2).max(3);
const pair = z.tuple([z.boolean(), z.string()]);
for (const [name, schema, said] of [
  ["a list", texts, '{"elements": ["a"]}'],
  ["a list", texts, '{"elements": ["a", "b"]}'],
  ["a list in an object", z.object({ elements: texts }), '{"elements": ["a", "b"]}'],
  ["a tuple", pair, '{"elements": [true]}'],
  ["a tuple", pair, '{"elements": [true, "a"]}'],
  ["a tuple in an object", z.object({ elements: pair }), '{"elements": [true, "a"]}'],
  ["a date", z.object({ at: z.date() }), '{"at": "2026-11-30T12:00:00Z"}'],
  ["a date, coerced", z.object({ at: z.coerce.date() }), '{"at": "2026-11-30T12:00:00Z"}'],
]) {
  answer = said;
  let read;
  try {
    read = JSON.stringify((await agent.generate("Hi", { structuredOutput: { schema } })).object);
  } catch (error) {
    read = error.message.replace(/^.*\s- /, "refused: ");
  }
  console.log(`${name}: ${JSON.stringify(asked.properties)}`);
  console.log(`  ${answer} -> ${read}`);
}
process.exit(0);
JAVASCRIPT

seen=$(node "$folder/ask.mjs" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
a list: {"elements":{"type":"array","items":{"type":"string"}}}
  {"elements": ["a"]} -> refused: root: Too small: expected array to have >=2 items
a list: {"elements":{"type":"array","items":{"type":"string"}}}
  {"elements": ["a", "b"]} -> ["a","b"]
a list in an object: {"elements":{"minItems":2,"maxItems":3,"type":"array","items":{"type":"string"}}}
  {"elements": ["a", "b"]} -> {"elements":["a","b"]}
a tuple: {"elements":{"type":"array","items":[{"type":"boolean"},{"type":"string"}]}}
  {"elements": [true]} -> refused: root: Too small: expected array to have >=2 items
a tuple: {"elements":{"type":"array","items":[{"type":"boolean"},{"type":"string"}]}}
  {"elements": [true, "a"]} -> [true,"a"]
a tuple in an object: {"elements":{"type":"array","items":[{"type":"boolean"},{"type":"string"}],"additionalItems":false,"minItems":2,"maxItems":2}}
  {"elements": [true, "a"]} -> {"elements":[true,"a"]}
a date: {"at":{"type":"string","format":"date-time","x-date":true}}
  {"at": "2026-11-30T12:00:00Z"} -> refused: at: Invalid input: expected date, received string
a date, coerced: {"at":{"type":"string","format":"date-time","x-date":false}}
  {"at": "2026-11-30T12:00:00Z"} -> {"at":"2026-11-30T12:00:00.000Z"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
