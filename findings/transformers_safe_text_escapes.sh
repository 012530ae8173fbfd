#!/usr/bin/env bash
# transformers 5.24.0 shows Functionary v3.1 its tools in HTML: of the parameters {"type": "object"} the prompt has {&#34;type&#34;: &#34;object&#34;},
# of a description "a < b" a &lt; b. The template, in llama.cpp's collection (source package of llama-cpp-python 0.3.36), marks its own
# words as `safe`, and in Jinja2 3.1.6 whatever is added to such a text with + is escaped, also where escaping is off, as it is
# in transformers: {{ "x "|safe + "<" }} is "x &lt;". `~` and a text alone are not. MiniJinja 3.1.0 escapes nothing.
#
# Guessed before: without escaping `safe` does nothing. Found 2026-12-01.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 jinja2==3.1.6 minijinja==3.1.0
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest "$folder" \
    llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder" --wildcards '*/models/templates/meetkai-*.jinja'

seen=$(cd "$folder" && "$python" -W ignore - 2>"$folder/log" <<'PYTHON'
from pathlib import Path

import minijinja
from transformers.utils.chat_template_utils import render_jinja_template

(path,) = Path().glob("*/vendor/llama.cpp/models/templates/meetkai-functionary-medium-v3.1.jinja")
messages = [{"role": "user", "content": "?"}]
function = {"name": "f", "description": "a < b", "parameters": {"type": "object"}}
tools = [{"type": "function", "function": function}]
for name, template in (
    ("Functionary", path.read_text()),
    ("+", "{{ 'Use the function '|safe + tools[0].function.description }}"),
    ("~", "{{ 'Use the function '|safe ~ tools[0].function.description }}"),
    ("alone", "{{ 'Use the function '|safe }}{{ tools[0].function.description }}"),
):
    texts = [render_jinja_template([messages], tools, chat_template=template, bos_token="")[0][0]]
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, pycompat=True)
    texts.append(environment.render_str(template, messages=messages, tools=tools, bos_token=""))
    for engine, text in zip(("transformers", "MiniJinja"), texts, strict=True):
        begin = text.index("Use the function ")
        print(f"{name}, {engine}:", " ".join(text[begin:].split("\n")[:2]))
PYTHON
) || { tail -n 5 "$folder/log" >&2; exit 1; }
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
Functionary, transformers: Use the function 'f' to 'a &lt; b' {&#34;name&#34;: &#34;f&#34;, &#34;description&#34;: &#34;a &lt; b&#34;, &#34;parameters&#34;: {&#34;type&#34;: &#34;object&#34;}}
Functionary, MiniJinja: Use the function 'f' to 'a < b' {"name": "f", "description": "a \u003c b", "parameters": {"type": "object"}}
+, transformers: Use the function a &lt; b
+, MiniJinja: Use the function a < b
~, transformers: Use the function a < b
~, MiniJinja: Use the function a < b
alone, transformers: Use the function a < b
alone, MiniJinja: Use the function a < b
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
