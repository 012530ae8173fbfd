#!/usr/bin/env bash
# @huggingface/jinja 0.5.11, which renders chat templates in JavaScript, writes values as JSON has them where Jinja2 3.1.6 writes Python:
# a boolean is true, a list ["a"] instead of ['a'], whether it is printed, joined with `~` or of the filter `string`. None is nothing,
# and with `string` an error. The templates of Qwen3-Coder, Qwen3.5, Nemotron 3 Nano and StepFun 3.5 write the arguments of earlier
# calls with that filter: of a call that passed true their models read true instead of True, and one that passed null is no prompt. A
# dictionary with numbers as its keys is an error, too, and so is each prompt of Seed-OSS, whose template has one.
#
# Guessed before: Python's words, as the templates were written for it. Found 2026-12-01. (Needs Node.js beside Python.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check jinja2==3.1.6
npm install --silent --no-audit --no-fund --prefix "$folder" @huggingface/jinja@0.5.11

cat > "$folder/templates.json" <<'JSON'
[
  "{{ value.flag|string }}",
  "{{ 'a' ~ value.flag }}",
  "{{ value.flag }} ({{ value.nothing }})",
  "{{ value.nothing|string }}",
  "{{ value.list }}",
  "{{ value.list|string }}",
  "{{ value.list|tojson }}",
  "{% set budgets = {512: 1} %}{{ budgets[512] }}"
]
JSON
cat > "$folder/render.py" <<'PYTHON'
import json
import sys

from jinja2.sandbox import ImmutableSandboxedEnvironment

for template in json.load(open(sys.argv[1])):
    value = {"flag": True, "nothing": None, "list": ["a", False]}
    print("Jinja2", template, "->", ImmutableSandboxedEnvironment().from_string(template).render(value=value))
PYTHON
cat > "$folder/render.mjs" <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { Template } from "@huggingface/jinja";

for (const template of JSON.parse(readFileSync(process.argv[2]))) {
  let text;
  try {
    text = new Template(template).render({ value: { flag: true, nothing: null, list: ["a", false] } });
  } catch (error) {
    text = error.message;
  }
  console.log("JavaScript", template, "->", text);
}
JAVASCRIPT
seen=$("$python" "$folder/render.py" "$folder/templates.json" && node "$folder/render.mjs" "$folder/templates.json")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Jinja2 {{ value.flag|string }} -> True
Jinja2 {{ 'a' ~ value.flag }} -> aTrue
Jinja2 {{ value.flag }} ({{ value.nothing }}) -> True (None)
Jinja2 {{ value.nothing|string }} -> None
Jinja2 {{ value.list }} -> ['a', False]
Jinja2 {{ value.list|string }} -> ['a', False]
Jinja2 {{ value.list|tojson }} -> ["a", false]
Jinja2 {% set budgets = {512: 1} %}{{ budgets[512] }} -> 1
JavaScript {{ value.flag|string }} -> true
JavaScript {{ 'a' ~ value.flag }} -> atrue
JavaScript {{ value.flag }} ({{ value.nothing }}) -> true ()
JavaScript {{ value.nothing|string }} -> Cannot apply filter "string" to type: NullValue
JavaScript {{ value.list }} -> ["a", false]
JavaScript {{ value.list|string }} -> ["a", false]
JavaScript {{ value.list|tojson }} -> ["a", false]
JavaScript {% set budgets = {512: 1} %}{{ budgets[512] }} -> Object keys must be strings: got IntegerValue
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
