#!/usr/bin/env bash
# @sodaru/yup-to-json-schema 2.0.1 leaves out of the schema of yup 1.7.1 what yup refuses: of `boolean().isTrue()`, a consent that has to
# be given, false is valid; `object().noUnknown()` is an open object, `string().lowercase()` any text, and `string().required()`, which
# refuses "", has no `minLength`. The flag of `matches(/^yes$/i)` is gone, so that "YES", which yup reads, never comes. `date()` is a
# "date-time", and in its strict mode yup reads no text as a date. Nothing is said of it. Bounds, lengths, `oneOf` and tuples are right.
#
# Guessed before: {"const": true}, `additionalProperties: false`, a `minLength` of 1. Found 2026-11-30. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" @sodaru/yup-to-json-schema@2.0.1 yup@1.7.1 ajv@8.20.0

cat >"$folder/run.mjs" <<'JAVASCRIPT'
import { convertSchema } from "@sodaru/yup-to-json-schema";
import Ajv from "ajv";
import * as yup from "yup";

const cases = [
  ["string().matches(/^yes$/i)", yup.string().matches(/^yes$/i), "YES"],
  ["string().required()", yup.string().required(), ""],
  ["boolean().isTrue()", yup.boolean().isTrue(), false],
  ["string().lowercase()", yup.string().lowercase(), "TEA"],
  ["string().notOneOf([\"x\"])", yup.string().notOneOf(["x"]), "x"],
  ["number().min(1).max(7)", yup.number().min(1).max(7), 85],
  ["tuple([number(), string()])", yup.tuple([yup.number(), yup.string()]), ["x", "y"]],
  ["object({b: number()}).noUnknown()", yup.object({ b: yup.number() }).noUnknown(), { b: 1, c: 2 }],
  ["array().of(number()).length(2)", yup.array().of(yup.number()).length(2), [1]],
  ["string().oneOf([\"x\", null]).nullable()", yup.string().oneOf(["x", null]).nullable(), null],
  ["mixed().oneOf([1, \"x\"])", yup.mixed().oneOf([1, "x"]), 1],
  ["date()", yup.date(), "2020-02-29"],
  ["number().when", yup.number().positive(), 0],
];
for (const [name, type, value] of cases) {
  const schema = convertSchema(yup.object({ a: type }));
  const valid = new Ajv({ strict: false, validateFormats: false }).compile(schema)({ a: value }) ? "valid" : "not valid";
  const read = await yup.object({ a: type }).validate({ a: value }, { strict: true }).then(() => "read", () => "refused");
  console.log(`${name}: ${JSON.stringify(schema.properties.a)}\n  ${JSON.stringify(value)} is ${valid}, ${read}`);
}
JAVASCRIPT

seen=$(node "$folder/run.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
string().matches(/^yes$/i): {"type":"string","pattern":"^yes$"}
  "YES" is not valid, read
string().required(): {"type":"string"}
  "" is valid, refused
boolean().isTrue(): {"type":"boolean"}
  false is valid, refused
string().lowercase(): {"type":"string"}
  "TEA" is valid, refused
string().notOneOf(["x"]): {"type":"string","not":{"enum":["x"]}}
  "x" is not valid, refused
number().min(1).max(7): {"type":"number","minimum":1,"maximum":7}
  85 is not valid, refused
tuple([number(), string()]): {"type":"array","items":[{"type":"number"},{"type":"string"}],"minItems":2,"maxItems":2}
  ["x","y"] is not valid, refused
object({b: number()}).noUnknown(): {"type":"object","default":{},"properties":{"b":{"type":"number"}}}
  {"b":1,"c":2} is valid, refused
array().of(number()).length(2): {"type":"array","items":{"type":"number"},"maxItems":2,"minItems":2}
  [1] is not valid, refused
string().oneOf(["x", null]).nullable(): {"type":["string","null"],"enum":["x",null]}
  null is valid, read
mixed().oneOf([1, "x"]): {"type":["number","string"],"enum":[1,"x"]}
  1 is valid, read
date(): {"type":"string","format":"date-time"}
  "2020-02-29" is valid, refused
number().when: {"type":"number","exclusiveMinimum":0}
  0 is not valid, refused
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
