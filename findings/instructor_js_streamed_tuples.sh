#!/usr/bin/env bash
# @instructor-ai/instructor 1.7.0, instructor for JavaScript: of a streamed answer (`stream: true`) what comes last is another object
# than the answer, without an error. A tuple [1, "a"] is {"0": 1, "1": "a"}, an optional field that the model left out is
# null, which the model's schema does not allow, and bounds are not looked at: 120 passes where 100 is the most. Only
# `_meta._isValid` is false. Whole, the same answers are right, and the last a ZodError.
#
# Guessed before: what comes last is the answer, checked as a whole one is. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" \
    @instructor-ai/instructor@1.7.0 openai@6.49.0 zod@4.6.7
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import Instructor from "@instructor-ai/instructor";
import OpenAI from "openai";
import { z } from "zod/v3";

let answer;
const head = { id: "x", created: 0, model: "m" };
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    const call = { index: 0, id: "c1", type: "function", function: { name: "Answer", arguments: answer } };
    const said = { role: "assistant", content: null, tool_calls: [call] };
    if (!JSON.parse(body).stream) {
      const choices = [{ index: 0, message: said, finish_reason: "tool_calls" }];
      const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
      response.setHeader("Content-Type", "application/json");
      response.end(JSON.stringify({ ...head, object: "chat.completion", choices, usage }));
      return;
    }
    const chunk = (delta, finish_reason) =>
      JSON.stringify({ ...head, object: "chat.completion.chunk", choices: [{ index: 0, delta, finish_reason }] });
    response.setHeader("Content-Type", "text/event-stream");
    response.end([chunk(said, null), chunk({}, "tool_calls"), "[DONE]"].map((one) => `data: ${one}\n\n`).join(""));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
console.warn = () => {};
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const client = Instructor({ client: new OpenAI({ baseURL, apiKey: "-", maxRetries: 0 }), mode: "TOOLS" });
const schema = z.object({ pair: z.tuple([z.number(), z.string()]), note: z.string().optional(), score: z.number().max(100) });

for (answer of ['{"pair": [1, "a"], "note": "n", "score": 50}', '{"pair": [1, "a"], "score": 120}']) {
  console.log(answer);
  for (const stream of [false, true]) {
    const given = { model: "m", messages: [{ role: "user", content: "Hi" }], max_retries: 0 };
    let read;
    try {
      read = await client.chat.completions.create({ ...given, response_model: { schema, name: "Answer" }, stream });
      if (stream) for await (const one of read) read = one;
      const { _meta, ...fields } = read;
      read = JSON.stringify(fields) + (stream ? ` valid: ${_meta._isValid}` : "");
    } catch (error) {
      read = error.name;
    }
    console.log(stream ? "  streamed" : "  whole", read);
  }
}
process.exit(0);
JAVASCRIPT

seen=$(node "$folder/ask.mjs" 2>/dev/null | grep -v '^\[Instructor')
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{"pair": [1, "a"], "note": "n", "score": 50}
  whole {"pair":[1,"a"],"note":"n","score":50}
  streamed {"pair":{"0":1,"1":"a"},"note":"n","score":50} valid: false
{"pair": [1, "a"], "score": 120}
  whole ZodError
  streamed {"pair":{"0":1,"1":"a"},"note":null,"score":120} valid: false
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
