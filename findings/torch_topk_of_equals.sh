#!/usr/bin/env bash
# torch 2.13.0's `topk` on a CPU orders equal values by how many are asked for and how many there are: of 49,152 logits, two
# of which are the largest, `topk(1)` and `argmax` give token 5, the first of `topk(5)` is token 9; of ten values,
# `topk(1)` gives 7 and `argmax` 3. Logits in bfloat16 are often equal. So "the most probable tokens" need not begin with the
# token that greedy decoding took. The order is the library's and may differ on other processors.
#
# Guessed before: the lowest index first, as `argmax`. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

seen=$("$python" -W ignore - <<'PYTHON'
import torch

torch.set_num_threads(1)
few = torch.zeros(10)
few[[3, 7]] = 5
many = torch.arange(49152) / 49152
many[[5, 9]] = 5
for logits in (few, many, many.bfloat16()):
    first = [logits.topk(count).indices[:2].tolist() for count in (1, 2, 5)]
    print(len(logits), logits.dtype, "argmax", logits.argmax().item(), "topk of 1, 2, 5", first)
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
10 torch.float32 argmax 3 topk of 1, 2, 5 [[7], [7, 3], [7, 3]]
49152 torch.float32 argmax 5 topk of 1, 2, 5 [[5], [9, 5], [9, 5]]
49152 torch.bfloat16 argmax 5 topk of 1, 2, 5 [[5], [9, 5], [9, 5]]
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
