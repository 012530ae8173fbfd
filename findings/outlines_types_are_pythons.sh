#!/usr/bin/env bash
# outlines 1.3.3 writes the values of Python types as Python does, which are no JSON and are read as such by no other library:
# `bool` is True or False, `Optional[int]` a number or None, `tuple[int, str]` stands in parentheses. A `datetime` has white space where
# ISO 8601 has T, any of `\s`, a line break, too, and no zone. A text in a list or a dictionary is anything but a quote
# between quotes, so that it may hold a line break, or a backslash as it stands, and no quote at all; the text of a plain
# `str` has quotes around it. A pydantic model is JSON, whose `datetime` has its T.
#
# Guessed before: true, null, and JSON's texts in a list, as in the model. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check outlines==1.3.3 outlines-core==0.2.14 pydantic==2.14.4

seen=$("$python" -W ignore - 2>/dev/null <<'PYTHON'
import json
import re
from datetime import datetime
from typing import Optional

from outlines.types.dsl import python_types_to_terms, to_regex

line, backslash = chr(10), chr(92)
for kind, texts in (
    (bool, ("true", "True")),
    (Optional[int], ("null", "None")),
    (tuple[int, str], ('[1, "a"]', '(1, "a")')),
    (datetime, ("2026-01-31T12:00:00", "2026-01-31 12:00:00", f"2026-01-31{line}12:00:00", "2026-01-31T12:00:00Z")),
    (str, ("a", '"a"')),
    (list[str], ('["a", "b"]', f'["a{line}b"]', f'["{backslash}d"]', f'["a{backslash}"b"]')),
    (dict[str, int], ('{"a":1, "b":2}', '{"a": 1}')),
):
    regex = to_regex(python_types_to_terms(kind))
    for text in texts:
        try:
            json.loads(text)
            said = "JSON"
        except ValueError:
            said = "no JSON"
        taken = "taken" if re.fullmatch(regex, text) else "refused"
        print(kind.__name__ if type(kind) is type else kind, repr(text), taken, said)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
bool 'true' refused JSON
bool 'True' taken no JSON
typing.Optional[int] 'null' refused JSON
typing.Optional[int] 'None' taken no JSON
tuple[int, str] '[1, "a"]' refused JSON
tuple[int, str] '(1, "a")' taken no JSON
datetime '2026-01-31T12:00:00' refused no JSON
datetime '2026-01-31 12:00:00' taken no JSON
datetime '2026-01-31\n12:00:00' taken no JSON
datetime '2026-01-31T12:00:00Z' refused no JSON
str 'a' refused no JSON
str '"a"' taken JSON
list[str] '["a", "b"]' taken JSON
list[str] '["a\nb"]' taken no JSON
list[str] '["\\d"]' taken no JSON
list[str] '["a\\"b"]' refused JSON
dict[str, int] '{"a":1, "b":2}' taken JSON
dict[str, int] '{"a": 1}' refused JSON
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
