#!/usr/bin/env bash
# @valibot/to-json-schema 1.8.0 describes two types by what they refuse: `v.isoDateTime()`, which reads 2020-01-01T10:00 and nothing with
# seconds or a zone, is {"format": "date-time"}, and a date-time has both (RFC 3339); `v.isoTime()`, which reads 10:00, is
# {"format": "time"}. So whatever a server writes that holds the schema is refused by valibot 1.5.0. `v.isoTimestamp()` reads a
# date-time, and `v.isoTimeSecond()` has a pattern. ajv-formats 3.0.1 says what is valid.
#
# Guessed before: a pattern, as valibot has one of each. Found 2026-11-30. (Needs Node.js.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --prefix "$folder" \
  valibot@1.5.0 @valibot/to-json-schema@1.8.0 ajv@8.20.0 ajv-formats@3.0.1
cat >"$folder/show.mjs" <<'JAVASCRIPT'
import { toJsonSchema } from "@valibot/to-json-schema";
import Ajv from "ajv";
import addFormats from "ajv-formats";
import * as v from "valibot";

const texts = ["2020-01-01T10:00", "2020-01-01T10:00:00Z", "10:00", "10:00:00", "10:00:00Z"];
for (const name of ["isoDateTime", "isoTimestamp", "isoTime", "isoTimeSecond"]) {
  const type = v.pipe(v.string(), v[name]());
  const schema = toJsonSchema(type, { errorMode: "throw" });
  const ajv = new Ajv();
  addFormats(ajv);
  const valid = ajv.compile(schema);
  console.log(`${name}: ${schema.format ?? "a pattern"}`);
  console.log(`    valid: ${texts.filter((text) => valid(text)).join(", ")}`);
  console.log(`    read: ${texts.filter((text) => v.safeParse(type, text).success).join(", ")}`);
}
JAVASCRIPT
seen=$(node "$folder/show.mjs")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
isoDateTime: date-time
    valid: 2020-01-01T10:00:00Z
    read: 2020-01-01T10:00
isoTimestamp: date-time
    valid: 2020-01-01T10:00:00Z
    read: 2020-01-01T10:00:00Z
isoTime: time
    valid: 10:00:00Z
    read: 10:00
isoTimeSecond: a pattern
    valid: 10:00:00
    read: 10:00:00
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
