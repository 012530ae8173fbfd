#!/usr/bin/env bash
# safetensors 0.8.0 (`safetensors.numpy.save` and `save_file`) writes an array that is not contiguous with its values in
# another order, without a word: of `a.T`, which transposes a weight, the file has the transposed shape and the values of `a`
# as they lie in memory, and of `a[:, 1:]` the values that follow each other there. The docstring wants contiguous arrays.
# 0.7.0 writes the same arrays right, and `safetensors.torch` of 0.8.0 refuses such tensors. `numpy.ascontiguousarray` helps.
#
# Guessed before: right values, or the refusal that `safetensors.torch` has. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/save.py" <<'PYTHON'
import numpy
import safetensors
from safetensors.numpy import load, save

print(safetensors.__version__)
a = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
for name, array in (
    ("a", a),
    ("a.T", a.T),
    ("a[:, 1:]", a[:, 1:]),
    ("ascontiguousarray(a.T)", numpy.ascontiguousarray(a.T)),
):
    back = load(save({"x": array}))["x"]
    print(" ", name, back.shape == array.shape, array.tolist() == back.tolist(), back.ravel().astype(int).tolist())
PYTHON
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
seen=""
for version in 0.7.0 0.8.0; do
  "$python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 safetensors==$version
  seen+=$("$python" "$folder/save.py")$'\n'
done
printf '%s' "$seen"
expected=$(cat <<'TEXT'
0.7.0
  a True True [0, 1, 2, 3, 4, 5]
  a.T True True [0, 3, 1, 4, 2, 5]
  a[:, 1:] True True [1, 2, 4, 5]
  ascontiguousarray(a.T) True True [0, 3, 1, 4, 2, 5]
0.8.0
  a True True [0, 1, 2, 3, 4, 5]
  a.T True False [0, 1, 2, 3, 4, 5]
  a[:, 1:] True False [1, 2, 3, 4]
  ascontiguousarray(a.T) True True [0, 3, 1, 4, 2, 5]
TEXT
)
[ "$seen" = "$expected"$'\n' ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
