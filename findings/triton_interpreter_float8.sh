#!/usr/bin/env bash
# Triton 3.9.0's interpreter (TRITON_INTERPRET=1) halves numbers when it makes float8 of them: where rounding carries into
# the exponent, the exponent stays. 1.95 becomes 1.0 in float8_e4m3fn, 0.476 becomes 0.25 in float8_e5m2; of 4,096 numbers of
# a normal distribution 106 and 196 come out as half of what they are. What float8 does not hold becomes some number,
# infinity 256, NaN 384; codes of NaN and of e5m2's infinity are read as 480 and 65536. bfloat16 is cut off, not rounded,
# whatever `fp_downcast_rounding` says; float16 is right. Triton's documented default is `rtne`, to the nearest, as torch 2.13.0
# rounds. So a kernel that quantises is tested with other numbers than it will write.
#
# Guessed before: rounded to the nearest, NaN or the largest number beyond the range. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/kernels.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def cast(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def interpreted(values, kind):
    out = torch.zeros(len(values), dtype=kind)
    cast[(1,)](values, out, size=len(values))
    return out.float()


numbers = torch.randn(4096, generator=torch.manual_seed(0))
some = torch.tensor([1.5, 1.95, -1.95, 0.476, 0.0019, 500.0, float("inf"), float("nan")])
for kind in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
    one, other = interpreted(numbers, kind), numbers.to(kind).float()
    wrong = one != other
    print(kind, "of 4096 differ", int(wrong.sum()), "halves", int((wrong & (2 * one == other)).sum()))
    for name, given in (("interpreter", interpreted(some, kind)), ("torch", some.to(kind).float())):
        print("  ", name, *(f"{number:g}" for number in given.tolist()))
for kind, codes in ((torch.float8_e4m3fn, [0x7E, 0x7F]), (torch.float8_e5m2, [0x7B, 0x7C, 0x7F])):
    stored = torch.tensor(codes, dtype=torch.uint8).view(kind)
    stored = torch.cat([stored, stored.new_zeros(8 - len(codes))])
    read = interpreted(stored, torch.float32)[: len(codes)]
    print("codes of", kind, "interpreter", *read.tolist(), "torch", *stored.float()[: len(codes)].tolist())
PYTHON

python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 triton==3.9.0 numpy==2.4.6

seen=$(TRITON_INTERPRET=1 "$python" -W ignore "$folder/kernels.py")
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
torch.float16 of 4096 differ 0 halves 0
   interpreter 1.5 1.9502 -1.9502 0.476074 0.00189972 500 inf nan
   torch 1.5 1.9502 -1.9502 0.476074 0.00189972 500 inf nan
torch.bfloat16 of 4096 differ 2047 halves 0
   interpreter 1.5 1.94531 -1.94531 0.474609 0.00189972 500 inf nan
   torch 1.5 1.95312 -1.95312 0.476562 0.00189972 500 inf nan
torch.float8_e4m3fn of 4096 differ 123 halves 106
   interpreter 1.5 1 -1 0.46875 0 256 256 384
   torch 1.5 2 -2 0.46875 0.00195312 448 448 nan
torch.float8_e5m2 of 4096 differ 196 halves 196
   interpreter 1.5 1 -1 0.25 0.000976562 256 inf nan
   torch 1.5 2 -2 0.5 0.00195312 512 inf nan
codes of torch.float8_e4m3fn interpreter 448.0 480.0 torch 448.0 nan
codes of torch.float8_e5m2 interpreter 57344.0 65536.0 114688.0 torch 57344.0 inf nan
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
