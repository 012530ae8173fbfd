#!/usr/bin/env bash
# openai 6.49.0 for JavaScript (`zodResponseFormat`, `zodTextFormat`, `zodFunction`) describes `z.number().nullable()` of a zod 3 model as
# {"type": "number", "nullable": true}, a keyword of OpenAPI 3.0 that JSON Schema does not know, and requires the
# field: a server that holds the schema makes the model invent a number. So it is with texts and booleans, and with
# `.nullable().optional()`, while `.optional().nullable()`, an `enum`, a list, an object and a union have null in
# `anyOf` or `type`, and so do all of a zod 4 model. `.optional()` alone is refused, with the advice to make it
# nullable. jsonschema 4.26.0 says what may be null.
#
# Guessed before: null is in `type` or `anyOf` of each. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check jsonschema==4.26.0
npm install --silent --no-audit --no-fund --prefix "$folder" openai@6.49.0 zod@4.6.7
cat >"$folder/schemas.mjs" <<'JAVASCRIPT'
import { zodResponseFormat } from "openai/helpers/zod";
import { z as four } from "zod";
import { z as three } from "zod/v3";

const model = (z) =>
  z.object({
    number: z.number().nullable(),
    bool: z.boolean().nullable(),
    first: z.string().nullable().optional(),
    last: z.string().optional().nullable(),
    choice: z.enum(["a", "b"]).nullable(),
    list: z.array(z.number()).nullable(),
    union: z.union([z.number(), z.null()]),
  });
const schemas = {};
for (const [name, z] of Object.entries({ "zod 3": three, "zod 4": four })) {
  schemas[name] = zodResponseFormat(model(z), "answer").json_schema.schema;
}
console.log(JSON.stringify(schemas));
JAVASCRIPT

seen=$(node "$folder/schemas.mjs" | "$python" -W ignore -c '
import json
import sys

from jsonschema import Draft7Validator

for name, schema in json.load(sys.stdin).items():
    print(name, "requires", " ".join(schema["required"]))
    for field, described in schema["properties"].items():
        held = "may be null" if Draft7Validator(described).is_valid(None) else "may not be null"
        print(f"  {field}: {json.dumps(described)} {held}")
')
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
zod 3 requires number bool first last choice list union
  number: {"type": "number", "nullable": true} may not be null
  bool: {"type": "boolean", "nullable": true} may not be null
  first: {"type": "string", "nullable": true} may not be null
  last: {"anyOf": [{"type": "string"}, {"type": "null"}]} may be null
  choice: {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]} may be null
  list: {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]} may be null
  union: {"type": ["number", "null"]} may be null
zod 4 requires number bool first last choice list union
  number: {"type": ["number", "null"]} may be null
  bool: {"type": ["boolean", "null"]} may be null
  first: {"type": ["string", "null"]} may be null
  last: {"type": ["string", "null"]} may be null
  choice: {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]} may be null
  list: {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]} may be null
  union: {"type": ["number", "null"]} may be null
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
