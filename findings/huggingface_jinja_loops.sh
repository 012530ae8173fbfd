#!/usr/bin/env bash
# @huggingface/jinja 0.5.11, which renders chat templates in JavaScript, loses what a round of a loop has written when it
# meets `break` or `continue`: {% for a in [1, 2, 3] %}{{ a }}{% if a == 2 %}{% break %}{% endif %}{% endfor %} is "1", in
# Jinja2 3.1.6 "12". And a key of a dictionary hides its method: `schema.items()` fails for {"type": "array", "items":
# ...}, the schema of a tool's list. The filter `schema|items` works, and Jinja2 takes the method both times.
#
# Guessed before: "12", and the method. Found 2026-11-29. (Needs Node.js beside Python.)
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check jinja2==3.1.6
npm install --silent --no-audit --no-fund --prefix "$folder" @huggingface/jinja@0.5.11 >/dev/null

cat >"$folder/templates.json" <<'JSON'
[
  "{% for a in [1, 2, 3] %}{{ a }}{% if a == 2 %}{% break %}{% endif %}{% endfor %}",
  "{% for a in [1, 2, 3] %}{{ a }}{% if a == 2 %}{% continue %}{% endif %};{% endfor %}",
  "{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}{% endfor %}",
  "{% for key, value in schema.items() %}{{ key }},{% endfor %}",
  "{% for key, value in schema|items %}{{ key }},{% endfor %}"
]
JSON
cat >"$folder/render.mjs" <<'JS'
import fs from "node:fs";
import { Template } from "@huggingface/jinja";

const schema = { type: "array", items: { type: "string" } };
for (const text of JSON.parse(fs.readFileSync("templates.json", "utf8"))) {
  let found;
  try {
    found = new Template(text).render({ schema });
  } catch {
    found = "an error";
  }
  console.log(`JavaScript: ${found}`);
}
JS
cat >"$folder/render.py" <<'PYTHON'
import json

import jinja2

environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
schema = {"type": "array", "items": {"type": "string"}}
for text in json.load(open("templates.json")):
    print("Python:", environment.from_string(text).render(schema=schema))
PYTHON
seen=$(cd "$folder" && "$python" render.py && node render.mjs)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Python: 12
Python: 1;23;
Python: 13
Python: type,items,
Python: type,items,
JavaScript: 1
JavaScript: 1;3;
JavaScript: 13
JavaScript: an error
JavaScript: type,items,
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
