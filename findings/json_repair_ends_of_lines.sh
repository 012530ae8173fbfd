#!/usr/bin/env bash
# json-repair 0.64.6, with which crewAI, DSPy and langroid read answers, changes texts that are whole where anything else of the answer is not:
# line ends at the end of a text are gone, and a backslash before a quote is, too, so that of a tool's code
# print("a \"b\"") is print("a "b""), which is no Python. A comma too many or an answer that a length ended is
# enough, and with `skip_json_loads=True` it does so to valid JSON. With a fence or words around valid JSON it reads
# what Python's json reads. jiter 0.19.0 and partial-json-parser 0.2.1.1.post7 keep the texts of a cut answer.
#
# Guessed before: what is whole stays as it is. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check json-repair==0.64.6 jiter==0.19.0 partial-json-parser==0.2.1.1.post7

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json

import jiter
import json_repair
import partial_json_parser


def without_json(text):
    return json_repair.loads(text, skip_json_loads=True)


def by_jiter(text):
    return jiter.from_json(text.encode(), partial_mode="trailing-strings")


CODE = 'print("a \\"b\\"")\n'
valid = json.dumps({"code": CODE, "n": 1})
cut = valid.replace('"n": 1}', '"note": "It pri')
for name, text, read in (
    ("valid", valid, json_repair.loads),
    ("valid in a fence", f"Here it is:\n```json\n{valid}\n```", json_repair.loads),
    ("valid, skip_json_loads", valid, without_json),
    ("a comma too many", valid.replace("}", ",}"), json_repair.loads),
    ("cut", cut, json_repair.loads),
    ("cut, jiter", cut, by_jiter),
    ("cut, partial-json-parser", cut, partial_json_parser.loads),
):
    code = read(text)["code"]
    print(f"{name}: {code!r}", "as it was" if code == CODE else "changed")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
valid: 'print("a \\"b\\"")\n' as it was
valid in a fence: 'print("a \\"b\\"")\n' as it was
valid, skip_json_loads: 'print("a "b"")' changed
a comma too many: 'print("a "b"")' changed
cut: 'print("a "b"")' changed
cut, jiter: 'print("a \\"b\\"")\n' as it was
cut, partial-json-parser: 'print("a \\"b\\"")\n' as it was
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
