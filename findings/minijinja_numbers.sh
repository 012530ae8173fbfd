#!/usr/bin/env bash
# MiniJinja 3.1.0, which renders chat templates where there is no Python, writes numbers otherwise than Jinja2 3.1.6:
# never an exponent (1e-07 is 0.0000001, 1e16 is 10000000000000000.0), and an integer beyond 128 bits becomes a
# float that is rounded. Booleans, null, lists and `tojson` are written alike (with `pycompat`).
# So a call's arguments that a template prints as they are (`{{ value }}`) give two prompts, by server.
#
# Guessed before: numbers alike, and booleans otherwise. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check minijinja==3.1.0 jinja2==3.1.6

seen=$("$python" -W ignore - <<'PYTHON'
import jinja2
import minijinja

for value in (0.5, 1e15, 1e16, 1e-4, 1e-7, 2**64 + 1, 2**130, True, None, ["a", 1.0]):
    one = jinja2.Environment().from_string("{{ v }}").render(v=value)
    other = minijinja.Environment(pycompat=True).render_str("{{ v }}", v=value)
    print("same " if one == other else "other", one, *([other] if one != other else []))
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
same  0.5
same  1000000000000000.0
other 1e+16 10000000000000000.0
same  0.0001
other 1e-07 0.0000001
same  18446744073709551617
other 1361129467683753853853498429727072845824 1361129467683754000000000000000000000000.0
same  True
same  None
same  ['a', 1.0]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
