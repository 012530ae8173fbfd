#!/usr/bin/env bash
# effect 4.1.0 for JavaScript (`Schema.toJsonSchemaDocument`) describes `Schema.Number` as a number or one of the texts "NaN", "Infinity" and
# "-Infinity", and leaves out its bounds: of `Schema.Number.check(Schema.isBetween({ minimum: 0, maximum: 1 }))` a server that
# holds the schema may write 85, or "NaN". `decodeUnknownSync` refuses both. An optional field may be null, which
# it refuses, too. `Schema.Finite` and `Schema.Int` are numbers with their bounds.
#
# Guessed before: {"type": "number", "minimum": 0, "maximum": 1}. Found 2026-11-30. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" effect@4.1.0 ajv@8.20.0
cat >"$folder/show.mjs" <<'JAVASCRIPT'
import Ajv from "ajv/dist/2020.js";
import { Schema } from "effect";

const between = Schema.isBetween({ minimum: 0, maximum: 1 });
const types = {
  Number: Schema.Number,
  "Number from 0 to 1": Schema.Number.check(between),
  "Finite from 0 to 1": Schema.Finite.check(between),
  "Int from 0 to 1": Schema.Int.check(between),
  "optional text": Schema.Struct({ a: Schema.optional(Schema.String) }),
};
for (const [name, type] of Object.entries(types)) {
  const { schema } = Schema.toJsonSchemaDocument(type);
  console.log(`${name}: ${JSON.stringify(schema)}`);
  const valid = new Ajv({ strict: false }).compile(schema);
  for (const value of name === "optional text" ? [{}, { a: null }] : [1, 85, "NaN"]) {
    let read = "read";
    try {
      Schema.decodeUnknownSync(type)(value);
    } catch {
      read = "refused";
    }
    console.log(`    ${JSON.stringify(value)} is ${valid(value) ? "valid" : "not valid"} and ${read}`);
  }
}
JAVASCRIPT
seen=$(node "$folder/show.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Number: {"anyOf":[{"type":"number"},{"type":"string","enum":["Infinity","-Infinity","NaN"]}]}
    1 is valid and read
    85 is valid and read
    "NaN" is valid and refused
Number from 0 to 1: {"anyOf":[{"type":"number"},{"type":"string","enum":["Infinity","-Infinity","NaN"]}]}
    1 is valid and read
    85 is valid and refused
    "NaN" is valid and refused
Finite from 0 to 1: {"type":"number","minimum":0,"maximum":1}
    1 is valid and read
    85 is not valid and refused
    "NaN" is not valid and refused
Int from 0 to 1: {"type":"integer","minimum":0,"maximum":1}
    1 is valid and read
    85 is not valid and refused
    "NaN" is not valid and refused
optional text: {"type":"object","properties":{"a":{"anyOf":[{"type":"string"},{"type":"null"}]}},"additionalProperties":true}
    {} is valid and read
    {"a":null} is valid and refused
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
