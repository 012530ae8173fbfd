#!/usr/bin/env bash
# effect 4.1.0 for JavaScript leaves a pattern out of the JSON schema that it writes (`Schema.toJsonSchemaDocument`), unless the regular
# expression has the flag `u`: of `Schema.String.check(Schema.isPattern(/^[A-Z]{2}-[0-9]+$/))` goes out {"type": "string"}, so that a
# server which holds the schema may write "tea", which `decodeUnknownSync` refuses. Patterns that effect has itself (`isUUID`,
# `isTrimmed`) are written. Nothing is said of it.
#
# Guessed before: the pattern, and none with flags that change what it means. Found 2026-11-30. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --legacy-peer-deps --prefix "$folder" effect@4.1.0

cat >"$folder/run.mjs" <<'JAVASCRIPT'
import { Schema } from "effect";

const sent = (check) => Schema.toJsonSchemaDocument(Schema.Struct({ a: Schema.String.check(check) })).schema.properties.a;
const read = (check, text) => {
  try {
    return Schema.decodeUnknownSync(Schema.Struct({ a: Schema.String.check(check) }))({ a: text }).a;
  } catch {
    return "refused";
  }
};
for (const pattern of [/^[A-Z]{2}-[0-9]+$/, /^[A-Z]{2}-[0-9]+$/u, /^yes$/i, /^(a|b)$/, /^a$/, /^\d+$/, /b/]) {
  const { pattern: written } = sent(Schema.isPattern(pattern));
  console.log(`${pattern}: ${written === undefined ? "no pattern" : written}, "tea" ${read(Schema.isPattern(pattern), "tea")}`);
}
const others = [["isStartsWith", "a.b"], ["isEndsWith", "c"], ["isIncludes", "d"], ["isUUID", undefined], ["isMinLength", 2], ["isTrimmed", undefined], ["isLowercased", undefined]];
for (const [name, given] of others) if (Schema[name]) console.log(`${name}: ${JSON.stringify(sent(Schema[name](given)))}`);
JAVASCRIPT

seen=$(node "$folder/run.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
/^[A-Z]{2}-[0-9]+$/: no pattern, "tea" refused
/^[A-Z]{2}-[0-9]+$/u: ^[A-Z]{2}-[0-9]+$, "tea" refused
/^yes$/i: no pattern, "tea" refused
/^(a|b)$/: no pattern, "tea" refused
/^a$/: no pattern, "tea" refused
/^\d+$/: no pattern, "tea" refused
/b/: no pattern, "tea" refused
isUUID: {"type":"string","pattern":"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|00000000-0000-0000-0000-000000000000|[fF]{8}-[fF]{4}-[fF]{4}-[fF]{4}-[fF]{12})$","format":"uuid"}
isMinLength: {"type":"string","minLength":1}
isTrimmed: {"type":"string","pattern":"^\\S[\\s\\S]*\\S$|^\\S$|^$"}
isLowercased: {"type":"string","pattern":"^[^A-Z]*$"}
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
