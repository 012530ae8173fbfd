#!/usr/bin/env bash
# In Jinja2 3.1.6 and MiniJinja 3.1.0 `~`, which joins texts, binds tighter than `+` and `-`, and looser than `*`:
# {{ "turn " ~ loop.index0 + 1 }} is ("turn " ~ loop.index0) + 1, an error, where {{ "turn " ~ 2 * 3 }} is "turn 6".
# Parentheses help: {{ "turn " ~ (loop.index0 + 1) }}.
#
# Guessed before: "turn 1", as with any operator of texts beside one of numbers. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check minijinja==3.1.0 jinja2==3.1.6

seen=$("$python" -W ignore - <<'PYTHON'
import jinja2
import minijinja

for text in ("'turn ' ~ n + 1", "'turn ' ~ (n + 1)", "'turn ' ~ 2 * 3", "n + 1 ~ ' turns'"):
    found = []
    for render in (
        lambda text: jinja2.Environment().from_string(text).render(n=0),
        lambda text: minijinja.Environment().render_str(text, n=0),
    ):
        try:
            found.append(render("{{ " + text + " }}"))
        except (TypeError, minijinja.TemplateError):
            found.append("an error")
    print(f"{text}: {found}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
'turn ' ~ n + 1: ['an error', 'an error']
'turn ' ~ (n + 1): ['turn 1', 'turn 1']
'turn ' ~ 2 * 3: ['turn 6', 'turn 6']
n + 1 ~ ' turns': ['an error', 'an error']
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
