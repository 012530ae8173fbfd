#!/usr/bin/env bash
# The gguf package 0.19.0 leaves out what is empty: `add_string(key, "")` and `add_array(key, [])` write no key at
# all, without a word, so a reader cannot tell an empty text (a chat template that is switched off) from one
# that was never there. And `GGUFReader`'s `contents()` of lists within a list is one flat list: the file has
# [[1], [2, 3]], types say array of arrays, and what is read is [1, 2, 3].
#
# Guessed before: the empty list is left out, all else comes back as it was given. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check gguf==0.19.0

seen=$("$python" -W ignore - <<'PYTHON'
import tempfile

from gguf import GGUFReader, GGUFWriter

path = tempfile.mktemp()
writer = GGUFWriter(path, "llama")
writer.add_string("a.text", "x")
writer.add_string("an.empty.text", "")
writer.add_array("a.list", [1, 2])
writer.add_array("an.empty.list", [])
writer.add_array("lists", [[1], [2, 3]])
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()
reader = GGUFReader(path)
for key in ("a.text", "an.empty.text", "a.list", "an.empty.list", "lists"):
    field = reader.get_field(key)
    print(key, field and [kind.name for kind in field.types], field and field.contents())
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
a.text ['STRING'] x
an.empty.text None None
a.list ['ARRAY', 'INT32'] [1, 2]
an.empty.list None None
lists ['ARRAY', 'ARRAY', 'INT32'] [1, 2, 3]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
