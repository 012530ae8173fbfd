#!/usr/bin/env bash
# arktype 2.2.10 describes `string.date.iso` to a server (`toJsonSchema`) by a pattern of 274 characters with two references to groups (`\3`
# and `\17`: a date is written with all its hyphens, or without any), and without a format. No automaton holds these, so that libraries
# which mask tokens refuse the schema: llguidance 1.9.1 does, with the engine of Rust's `regex`. Who holds the pattern otherwise may
# get "2020-W05-5", "-2020" or "2020", which arktype reads as dates. Other formats of arktype have patterns that any engine takes.
#
# Guessed before: {"format": "date-time"}, or a simple pattern. Found 2026-11-30. (Needs Node.js beside Python.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1
npm install --silent --no-audit --no-fund --prefix "$folder" arktype@2.2.10 ajv@8.20.0

cat >"$folder/run.mjs" <<'JAVASCRIPT'
import fs from "node:fs";

import Ajv2020 from "ajv/dist/2020.js";
import { type } from "arktype";

for (const name of ["string.date.iso", "string.numeric", "string.uuid.v4", "string.email"]) {
  const { $schema, ...schema } = type(name).toJsonSchema();
  const pattern = schema.pattern ?? schema.anyOf?.map((one) => one.pattern ?? one.const).join(" ");
  const references = pattern === undefined ? "" : (pattern.match(/\\[1-9][0-9]?/g) ?? []).join(" ");
  console.log(`${name}: ${pattern?.length} characters, references to groups: ${references || "none"}, format ${schema.format}`);
}
fs.writeFileSync(process.argv[2], JSON.stringify(type("string.date.iso").toJsonSchema()));
const iso = type("string.date.iso");
const valid = new Ajv2020().compile(iso.toJsonSchema());
for (const text of ["2020-01-31", "2020-01-31T10:00:00Z", "20200131", "2020-W05-5", "2020-031", "-2020", "2020-0131"]) {
  console.log(`${text}: ${valid(text) ? "valid" : "not valid"}, ${iso(text) instanceof type.errors ? "refused" : "read"}`);
}
JAVASCRIPT

cat >"$folder/compile.py" <<'PYTHON'
import sys

from llguidance import LLMatcher, LLTokenizer

matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(open(sys.argv[1]).read()), log_level=0)
print("llguidance:", "refused" if matcher.get_error() else "compiled")
PYTHON

seen=$(node "$folder/run.mjs" "$folder/schema.json" && "$folder/venv/bin/python" "$folder/compile.py" "$folder/schema.json" 2>/dev/null)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
string.date.iso: 274 characters, references to groups: \3 \17, format undefined
string.numeric: 60 characters, references to groups: none, format undefined
string.uuid.v4: 81 characters, references to groups: none, format undefined
string.email: 39 characters, references to groups: none, format email
2020-01-31: valid, read
2020-01-31T10:00:00Z: valid, read
20200131: valid, read
2020-W05-5: valid, read
2020-031: valid, read
-2020: valid, read
2020-0131: not valid, refused
llguidance: refused
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
