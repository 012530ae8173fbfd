#!/usr/bin/env bash
# MiniJinja 3.1.0 (for Python, with `pycompat`) writes `tojson` for a page of HTML, also where escaping is off: a tool with "a < b" or "it's"
# in its description stands in the prompt with \u003c and \u0027, where transformers 5.24.0, which has a `tojson` of its own for
# chat templates, writes the characters. `tojson(ensure_ascii=False)`, which the templates of GLM 4.6, MiniMax M2, Kimi K3, MiniCPM 5
# and StepFun 3.5 say (llama.cpp's collection has them), is an error, and so is {% generation %} of LFM 2.5, which marks what is trained on.
# `indent` is read.
#
# Held before (`minijinja_numbers.sh`, beside the `tojson` of Jinja2): `tojson` is written alike. Found 2026-12-01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6 minijinja==3.1.0

seen=$("$python" -W ignore - 2>"$folder/log" <<'PYTHON'
import minijinja
from transformers.utils.chat_template_utils import render_jinja_template

tools = [{"name": "f", "description": "it's a < b & c"}]
for template in (
    "{{ tools[0]|tojson }}",
    "{{ tools[0].description|tojson }}",
    "{{ tools[0]|tojson(indent=1) }}",
    "{{ tools[0].name|tojson(ensure_ascii=False) }}",
    "{% generation %}{{ tools[0].name }}{% endgeneration %}",
):
    text = render_jinja_template([[]], tools, chat_template=template)[0][0]
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, pycompat=True)
    environment.auto_escape_callback = lambda name: False
    try:
        other = environment.render_str(template, tools=tools)
    except minijinja.TemplateError as error:
        other = f"error: {error.message}"
    print(template, "transformers", text.replace("\n", "|"), "MiniJinja", other.replace("\n", "|"))
PYTHON
) || { tail -n 5 "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
{{ tools[0]|tojson }} transformers {"name": "f", "description": "it's a < b & c"} MiniJinja {"name": "f", "description": "it\u0027s a \u003c b \u0026 c"}
{{ tools[0].description|tojson }} transformers "it's a < b & c" MiniJinja "it\u0027s a \u003c b \u0026 c"
{{ tools[0]|tojson(indent=1) }} transformers {| "name": "f",| "description": "it's a < b & c"|} MiniJinja {| "name": "f",| "description": "it\u0027s a \u003c b \u0026 c"|}
{{ tools[0].name|tojson(ensure_ascii=False) }} transformers "f" MiniJinja error: too many arguments: unknown keyword argument 'ensure_ascii' (in <string>:1)
{% generation %}{{ tools[0].name }}{% endgeneration %} transformers f MiniJinja error: syntax error: unknown statement generation (in <string>:1)
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
