#!/usr/bin/env bash
# compressed-tensors 0.20.1 packs widths that do not divide 32 as one stream of bits: a value may begin in one int32 and
# end in the next. 11 values of 3 bits take two int32 (33 bits), 7 of 5 bits too (35 bits, the last value's highest bit
# alone in the second). A reader that takes `32 // bits` values from each int32 gets 10 of 3 bits and reads the next
# value from the wrong place.
#
# Guessed before: `32 // bits` values in each int32, and the rest unused. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0 compressed-tensors==0.20.1

seen=$("$python" -W ignore - <<'PYTHON'
import importlib
import pkgutil

import compressed_tensors
import torch

for module in pkgutil.walk_packages(compressed_tensors.__path__, "compressed_tensors."):
    if "pack" in module.name and hasattr(found := importlib.import_module(module.name), "pack_to_int32"):
        break

for bits, count in ((4, 8), (3, 10), (3, 11), (3, 32), (5, 6), (5, 7), (6, 16)):
    codes = [number % 2**bits for number in range(count)]
    values = torch.tensor([codes], dtype=torch.int8) - 2 ** (bits - 1)
    packed = found.pack_to_int32(values, bits)
    back = found.unpack_from_int32(packed, bits, values.shape)
    assert torch.equal(back, values)
    words = [word & 0xFFFFFFFF for word in packed[0].tolist()]
    stream = sum(code << bits * at for at, code in enumerate(codes))
    per_word = [word >> bits * at & 2**bits - 1 for word in words for at in range(32 // bits)][:count]
    joined = sum(word << 32 * at for at, word in enumerate(words))
    print(f"{count} of {bits} bits: {len(words)} int32; one stream {joined == stream}; {32 // bits} in each {per_word == codes}")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
8 of 4 bits: 1 int32; one stream True; 8 in each True
10 of 3 bits: 1 int32; one stream True; 10 in each True
11 of 3 bits: 2 int32; one stream True; 10 in each False
32 of 3 bits: 3 int32; one stream True; 10 in each False
6 of 5 bits: 1 int32; one stream True; 6 in each True
7 of 5 bits: 2 int32; one stream True; 6 in each False
16 of 6 bits: 3 int32; one stream True; 5 in each False
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
