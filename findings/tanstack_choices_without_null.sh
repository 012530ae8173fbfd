#!/usr/bin/env bash
# @tanstack/ai 0.58.0 with @tanstack/ai-openai 0.23.1 (`outputSchema`): an optional field is required of the model, which may say null, and null is
# taken out of the answer. But where the field is a choice (`z.enum`, `z.literal`) null stands in `type` alone and
# not among the values, and where it is a union nothing of null is sent: no null is left that fits, so a server that
# holds the schema makes the model choose. The null of a union is refused as well. `.nullish()` fits all three.
# jsonschema 4.26.0 says what may be null.
#
# Guessed before: null fits each optional field. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jsonschema==4.26.0
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" \
    @tanstack/ai@0.58.0 @tanstack/ai-openai@0.23.1 openai@6.49.0 zod@4.6.7
cat >"$folder/ask.mjs" <<'JAVASCRIPT'
import http from "node:http";

import { chat } from "@tanstack/ai";
import { createOpenaiChatCompletions } from "@tanstack/ai-openai";
import { z } from "zod";

let asked;
const head = { id: "x", object: "chat.completion.chunk", created: 0, model: "m" };
const server = http.createServer((request, response) => {
  let body = "";
  request.on("data", (piece) => (body += piece));
  request.on("end", () => {
    asked = JSON.parse(body).response_format.json_schema.schema;
    const line = (delta, finish_reason) => JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason }] });
    const said = line({ role: "assistant", content: '{"field": null}' }, null);
    response.setHeader("Content-Type", "text/event-stream");
    response.end([said, line({}, "stop"), "[DONE]"].map((one) => `data: ${one}\n\n`).join(""));
  });
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const adapter = createOpenaiChatCompletions("m", "-", { baseURL });
const fields = {
  "a text": z.string(),
  "a choice": z.enum(["a", "b"]),
  "a constant": z.literal("a"),
  "a union": z.union([z.string(), z.int()]),
};
for (const [name, type] of Object.entries(fields)) {
  for (const [how, field] of [["optional", type.optional()], ["nullish", type.nullish()]]) {
    const outputSchema = z.object({ field });
    let read;
    try {
      read = JSON.stringify(await chat({ adapter, messages: [{ role: "user", content: "Hi" }], outputSchema }));
    } catch (error) {
      read = "refused";
    }
    console.log(JSON.stringify([`${name}, ${how}`, asked, read]));
  }
}
process.exit(0);
JAVASCRIPT

cat >"$folder/judge.py" <<'PYTHON'
import json
import sys

from jsonschema import Draft202012Validator

for line in sys.stdin:
    name, schema, read = json.loads(line)
    fits = Draft202012Validator(schema).is_valid({"field": None})
    print(f"{name}: {json.dumps(schema['properties']['field'])}")
    print(f"  null {'fits' if fits else 'does not fit'}, and is read as {read}")
PYTHON

seen=$(node "$folder/ask.mjs" 2>/dev/null | grep '^\["' | "$folder/venv/bin/python" "$folder/judge.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
a text, optional: {"type": ["string", "null"]}
  null fits, and is read as {}
a text, nullish: {"type": ["string", "null"]}
  null fits, and is read as {"field":null}
a choice, optional: {"type": ["string", "null"], "enum": ["a", "b"]}
  null does not fit, and is read as {}
a choice, nullish: {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]}
  null fits, and is read as {"field":null}
a constant, optional: {"type": ["string", "null"], "const": "a"}
  null does not fit, and is read as {}
a constant, nullish: {"anyOf": [{"type": "string", "const": "a"}, {"type": "null"}]}
  null fits, and is read as {"field":null}
a union, optional: {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}]}
  null does not fit, and is read as refused
a union, nullish: {"anyOf": [{"anyOf": [{"type": "string"}, {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}]}, {"type": "null"}]}
  null fits, and is read as {"field":null}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
