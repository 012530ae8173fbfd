#!/usr/bin/env bash
# joi-to-json 5.0.5 writes the flags of a regular expression into the pattern itself: of joi's `string().pattern(/^yes$/i)` goes out
# {"pattern": "^yes$/i"}, which no text matches, of /^a/i "^a/i", so that what a server writes that holds the schema begins with "a/i" and
# "Apple" never comes. Of `object().pattern(/^x/, number())` a key "/^x/" is valid, too; where the keys are a schema, as in
# `object().pattern(string().min(2), number())`, {} alone is. Of `array().ordered(number(), string())` any list is valid, and
# the `length` of a text, which an array keeps, is gone, as are `hex` and `port`. Nothing is said of it. joi 18.3.2 and ajv
# 8.20.0 say what is read and valid.
#
# Guessed before: "^yes$", a dictionary, a tuple, `minLength` and `maxLength`. Found 2026-12-01. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" joi-to-json@5.0.5 joi@18.3.2 ajv@8.20.0

cat >"$folder/run.mjs" <<'JAVASCRIPT'
import Ajv from "ajv";
import Joi from "joi";
import parse from "joi-to-json";

const cases = [
  ["string().pattern(/^yes$/)", Joi.string().pattern(/^yes$/), ["yes"]],
  ["string().pattern(/^yes$/i)", Joi.string().pattern(/^yes$/i), ["yes", "YES", "yes/i"]],
  ["string().pattern(/^a/i)", Joi.string().pattern(/^a/i), ["Apple", "a/i"]],
  ["object().pattern(/^x/, number())", Joi.object().pattern(/^x/, Joi.number()), [{ xy: 3 }, { "/^x/": 3 }]],
  ["object().pattern(string().min(2), number())", Joi.object().pattern(Joi.string().min(2), Joi.number()), [{}, { xy: 3 }]],
  ["array().ordered(number(), string())", Joi.array().ordered(Joi.number(), Joi.string()), [[1, "a"], ["a", 1, null]]],
  ["array().length(2)", Joi.array().length(2), [[1], [1, 2]]],
  ["string().length(2)", Joi.string().length(2), ["a", "ab"]],
  ["string().min(2).max(2)", Joi.string().min(2).max(2), ["a", "ab"]],
  ["string().hex()", Joi.string().hex(), ["tea", "ea"]],
  ["number().port()", Joi.number().port(), [70000, 80]],
  ["number().integer().min(0).max(65535)", Joi.number().integer().min(0).max(65535), [70000, 80]],
];
for (const [name, type, values] of cases) {
  const { $schema, ...schema } = parse(type);
  console.log(`${name}: ${JSON.stringify(schema)}`);
  const isValid = new Ajv({ strict: false }).compile(schema);
  for (const value of values) {
    const reads = type.validate(value, { convert: false }).error ? "refuses" : "reads";
    console.log(`  ${JSON.stringify(value)} is ${isValid(value) ? "valid" : "not valid"}, joi ${reads} it`);
  }
}
JAVASCRIPT

seen=$(node "$folder/run.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
string().pattern(/^yes$/): {"type":"string","pattern":"^yes$"}
  "yes" is valid, joi reads it
string().pattern(/^yes$/i): {"type":"string","pattern":"^yes$/i"}
  "yes" is not valid, joi reads it
  "YES" is not valid, joi reads it
  "yes/i" is not valid, joi refuses it
string().pattern(/^a/i): {"type":"string","pattern":"^a/i"}
  "Apple" is not valid, joi reads it
  "a/i" is valid, joi reads it
object().pattern(/^x/, number()): {"type":"object","properties":{"/^x/":{"type":"number"}},"additionalProperties":false,"patternProperties":{"^x":{"type":"number"}}}
  {"xy":3} is valid, joi reads it
  {"/^x/":3} is valid, joi refuses it
object().pattern(string().min(2), number()): {"type":"object","properties":{},"additionalProperties":false}
  {} is valid, joi reads it
  {"xy":3} is not valid, joi reads it
array().ordered(number(), string()): {"type":"array","items":{}}
  [1,"a"] is valid, joi reads it
  ["a",1,null] is valid, joi refuses it
array().length(2): {"type":"array","maxItems":2,"minItems":2,"items":{}}
  [1] is not valid, joi refuses it
  [1,2] is valid, joi reads it
string().length(2): {"type":"string"}
  "a" is valid, joi refuses it
  "ab" is valid, joi reads it
string().min(2).max(2): {"type":"string","minLength":2,"maxLength":2}
  "a" is not valid, joi refuses it
  "ab" is valid, joi reads it
string().hex(): {"type":"string"}
  "tea" is valid, joi refuses it
  "ea" is valid, joi reads it
number().port(): {"type":"number"}
  70000 is valid, joi refuses it
  80 is valid, joi reads it
number().integer().min(0).max(65535): {"type":"integer","minimum":0,"maximum":65535}
  70000 is not valid, joi refuses it
  80 is valid, joi reads it
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
