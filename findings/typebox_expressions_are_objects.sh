#!/usr/bin/env bash
# typebox 1.4.3, whose types admit `Type.String({ pattern: /^a/ })` and whose `Value.Check` holds it, keeps the regular expression as an
# object: in JSON, as it goes to a server, it is {"pattern": {}}, which is no schema in any draft (ajv 8.20.0), so that servers refuse
# the whole of it. And its tuples are those of draft 7, a list of `items`, without a `$schema` that says so: to a reader of 2020-12,
# which `$schema` is taken to be where it is missing, that is no schema either. A pattern that is a text is written as it is.
#
# Guessed before: the source of the expression, and `prefixItems`. Found 2026-11-30. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" typebox@1.4.3 ajv@8.20.0

cat >"$folder/run.mjs" <<'JAVASCRIPT'
import Ajv from "ajv";
import Ajv2020 from "ajv/dist/2020.js";
import { Type } from "typebox";
import { Value } from "typebox/value";

const cases = [
  ["Type.String({ pattern: /^a/ })", Type.String({ pattern: /^a/ }), "tea"],
  ['Type.String({ pattern: "^a" })', Type.String({ pattern: "^a" }), "tea"],
  ["Type.Tuple([Type.Number(), Type.String()])", Type.Tuple([Type.Number(), Type.String()]), ["x", 1]],
];
for (const [name, type, value] of cases) {
  const sent = JSON.parse(JSON.stringify(type));
  console.log(`${name}: ${JSON.stringify(sent)}`);
  console.log(`  typebox ${Value.Check(type, value) ? "reads" : "refuses"} ${JSON.stringify(value)}`);
  for (const [draft, kind] of [["draft 7", Ajv], ["2020-12", Ajv2020]]) {
    let judged;
    try {
      judged = new kind({ strict: false }).compile(sent)(value) ? "valid" : "not valid";
    } catch {
      judged = "no schema";
    }
    console.log(`  ${draft}: ${judged}`);
  }
}
JAVASCRIPT

seen=$(node "$folder/run.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Type.String({ pattern: /^a/ }): {"type":"string","pattern":{}}
  typebox refuses "tea"
  draft 7: no schema
  2020-12: no schema
Type.String({ pattern: "^a" }): {"type":"string","pattern":"^a"}
  typebox refuses "tea"
  draft 7: not valid
  2020-12: not valid
Type.Tuple([Type.Number(), Type.String()]): {"type":"array","additionalItems":false,"items":[{"type":"number"},{"type":"string"}],"minItems":2}
  typebox refuses ["x",1]
  draft 7: not valid
  2020-12: no schema
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
