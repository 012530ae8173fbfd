#!/usr/bin/env bash
# torch 2.13.0 and ml_dtypes 0.6.0 round what float8 cannot hold in different ways, on a CPU:
#
# - float8_e4m3fn ends at 448. torch gives 448 for anything larger, for infinity, too; ml_dtypes NaN.
# - float8_e5m2 has an infinity, and both give it, so torch saturates one format and not the other.
# - float8_e8m0fnu, the scales of MXFP4 and MXFP8, has no sign. torch drops the sign of -4, ml_dtypes gives NaN.
#
# So a checkpoint that was written with JAX's types and one that was written with torch's differ where a scale
# was too small. Guessed before: NaN in both, everywhere but in e5m2. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 ml-dtypes==0.6.0 numpy==2.4.6

seen=$("$python" -W ignore - <<'PYTHON'
import ml_dtypes
import numpy
import torch

for name, values in (
    ("float8_e4m3fn", (448, 464, 465, 1e9, -1e9, float("inf"), float("nan"))),
    ("float8_e5m2", (57344, 61440, float("inf"))),
    ("float8_e8m0fnu", (4, 3, -4, 0, float("inf"))),
):
    for value in values:
        one = torch.tensor(float(value)).to(getattr(torch, name)).float().item()
        other = numpy.float32(value).astype(getattr(ml_dtypes, name)).astype(numpy.float32)
        print(name, value, one, other)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
float8_e4m3fn 448 448.0 448.0
float8_e4m3fn 464 448.0 448.0
float8_e4m3fn 465 448.0 nan
float8_e4m3fn 1000000000.0 448.0 nan
float8_e4m3fn -1000000000.0 -448.0 nan
float8_e4m3fn inf 448.0 nan
float8_e4m3fn nan nan nan
float8_e5m2 57344 57344.0 57344.0
float8_e5m2 61440 inf inf
float8_e5m2 inf inf inf
float8_e8m0fnu 4 4.0 4.0
float8_e8m0fnu 3 4.0 4.0
float8_e8m0fnu -4 4.0 nan
float8_e8m0fnu 0 5.877471754111438e-39 nan
float8_e8m0fnu inf nan nan
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
