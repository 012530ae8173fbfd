#!/usr/bin/env bash
# zod 4.6.7 (`z.toJSONSchema`) describes each URL as {"format": "uri"}, which "tel:1" is as well: of `z.httpUrl()` and `z.url({ protocol,
# hostname })` what they want is nowhere in the schema, though both are regular expressions, which zod writes as `pattern` for
# each other format (emails, UUIDs, dates, hosts). So a server that holds the schema may write "tel:1", and zod refuses it. A `.regex()` behind
# `z.url()` is written as a pattern. ajv-formats 3.0.1 says what is valid.
#
# Guessed before: a pattern that begins with ^https?. Found 2026-11-30. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" zod@4.6.7 ajv@8.20.0 ajv-formats@3.0.1
cat >"$folder/show.mjs" <<'JAVASCRIPT'
import Ajv from "ajv/dist/2020.js";
import addFormats from "ajv-formats";
import { z } from "zod";

const types = {
  httpUrl: z.httpUrl(),
  "url with a protocol and a host": z.url({ protocol: /^https$/, hostname: /^example\.com$/ }),
  "url with a regex": z.url().regex(/^https:\/\/example\.com\//),
};
for (const [name, type] of Object.entries(types)) {
  const { $schema, ...schema } = z.toJSONSchema(type);
  console.log(`${name}: ${JSON.stringify(schema)}`);
  const ajv = new Ajv({ strict: false });
  addFormats(ajv);
  const valid = ajv.compile(schema);
  for (const text of ["tel:1", "http://other.org/", "https://example.com/a"]) {
    const read = type.safeParse(text).success ? "read" : "refused";
    console.log(`    ${text} is ${valid(text) ? "valid" : "not valid"} and ${read}`);
  }
}
JAVASCRIPT
seen=$(node "$folder/show.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
httpUrl: {"type":"string","format":"uri"}
    tel:1 is valid and refused
    http://other.org/ is valid and read
    https://example.com/a is valid and read
url with a protocol and a host: {"type":"string","format":"uri"}
    tel:1 is valid and refused
    http://other.org/ is valid and refused
    https://example.com/a is valid and read
url with a regex: {"type":"string","pattern":"^https:\\/\\/example\\.com\\/"}
    tel:1 is not valid and refused
    http://other.org/ is not valid and refused
    https://example.com/a is valid and read
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
