#!/usr/bin/env bash
# zod-from-json-schema 0.5.6, by which clients for JavaScript make zod's types of the schemas of MCP's tools, does not give them back: what
# `z.toJSONSchema` of zod 4.6.7 makes of its type, and a client sends, is {} where one required parameter may be of any kind, so that
# the types and bounds of all others are gone; lengths, multiples, the types of a tuple, `oneOf` and what a list of its own
# kind holds are gone, too. The type itself refuses such values, as refinements of which zod writes nothing. Bounds of numbers,
# `anyOf` and an optional parameter of any kind come through. ajv 8.20.0 says what is valid.
#
# Guessed before: the schema it was made of, but for `oneOf` and multiples. Found 2026-11-30. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" zod-from-json-schema@0.5.6 zod@4.6.7 ajv@8.20.0

cat >"$folder/run.mjs" <<'JAVASCRIPT'
import Ajv2020 from "ajv/dist/2020.js";
import { z } from "zod";
import { convertJsonSchemaToZod } from "zod-from-json-schema";

const object = (properties, required = ["a"]) => ({ type: "object", properties, required });
const count = { type: "integer", minimum: 1, maximum: 7 };
const cases = [
  ["bounds", object({ a: count }), { a: 85 }],
  ["bounds beside a field of any kind", object({ a: count, b: {} }, ["a"]), { a: 85 }],
  ["bounds beside a required field of any kind", object({ a: count, b: {} }, ["a", "b"]), { a: 85 }],
  ["a length", object({ a: { type: "string", maxLength: 2 } }), { a: "tea" }],
  ["a multiple", object({ a: { type: "integer", multipleOf: 5 } }), { a: 7 }],
  ["a tuple", object({ a: { type: "array", prefixItems: [{ type: "integer" }, { type: "string" }], minItems: 2 } }), { a: ["x", "y"] }],
  ["one of two", object({ a: { oneOf: [{ type: "integer" }, { type: "null" }] } }), { a: "x" }],
  ["any of two", object({ a: { anyOf: [{ type: "integer" }, { type: "null" }] } }), { a: "x" }],
  ["a list of its own kind", { $ref: "#/$defs/N", $defs: { N: object({ a: { type: "array", items: { $ref: "#/$defs/N" } } }) } }, { a: ["x"] }],
];
const valid = (schema, value) => (new Ajv2020({ strict: false }).compile(schema)(value) ? "valid" : "not valid");
for (const [name, schema, value] of cases) {
  const type = convertJsonSchemaToZod(schema);
  const { $schema, ...sent } = z.toJSONSchema(type, { io: "input" });
  console.log(`${name}: ${JSON.stringify(sent).slice(0, 90)}`);
  const read = type.safeParse(value).success ? "read" : "refused";
  console.log(`  ${JSON.stringify(value)} is ${valid(schema, value)} before, ${valid(sent, value)} behind it, ${read}`);
}
JAVASCRIPT

seen=$(node "$folder/run.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
bounds: {"type":"object","properties":{"a":{"type":"integer","minimum":1,"maximum":7}},"required":
  {"a":85} is not valid before, not valid behind it, refused
bounds beside a field of any kind: {"type":"object","properties":{"a":{"type":"integer","minimum":1,"maximum":7},"b":{}},"req
  {"a":85} is not valid before, not valid behind it, refused
bounds beside a required field of any kind: {}
  {"a":85} is not valid before, valid behind it, refused
a length: {"type":"object","properties":{"a":{"type":"string"}},"required":["a"],"additionalProperti
  {"a":"tea"} is not valid before, valid behind it, refused
a multiple: {"type":"object","properties":{"a":{"type":"integer","minimum":-9007199254740991,"maximum"
  {"a":7} is not valid before, valid behind it, refused
a tuple: {"type":"object","properties":{"a":{"minItems":2,"type":"array","items":{}}},"required":["
  {"a":["x","y"]} is not valid before, valid behind it, refused
one of two: {"type":"object","properties":{"a":{"anyOf":[{"type":"string"},{"type":"number"},{"type":"
  {"a":"x"} is not valid before, valid behind it, refused
any of two: {"type":"object","properties":{"a":{"anyOf":[{"type":"integer","minimum":-9007199254740991
  {"a":"x"} is not valid before, not valid behind it, refused
a list of its own kind: {"type":"object","properties":{"a":{"type":"array","items":{}}},"required":["a"],"addition
  {"a":["x"]} is not valid before, valid behind it, refused
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
