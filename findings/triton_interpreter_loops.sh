#!/usr/bin/env bash
# Triton 3.6.0's interpreter (TRITON_INTERPRET=1) cannot run a loop whose bound is an argument of the
# kernel where NumPy is 2.4.6: it raises InterpreterError("TypeError('only 0-dimensional arrays can be
# converted to Python scalars')"). With NumPy 2.3.5 the same loop runs, and the same kernel without a
# loop runs with both. Triton 3.9.0 runs the loop with NumPy 2.4.6.
#
# The interpreter makes an integer of an array with one element; NumPy 2.4 ended the deprecation of
# that (begun in 1.25). Neither package's requirements exclude the other. Found 2026-11-28.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/kernels.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def once(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at) + 1)


@triton.jit
def loop(x, out, rounds, size: tl.constexpr):
    at = tl.arange(0, size)
    total = tl.zeros((size,), tl.float32)
    for number in range(0, rounds):
        total += tl.load(x + number * size + at)
    tl.store(out + at, total)


x, out = torch.ones(64), torch.zeros(32)
for name, launch in (
    ("once", lambda: once[(1,)](x, out, size=32)),
    ("loop", lambda: loop[(1,)](x, out, 2, size=32)),
):
    try:
        launch()
        print(name, out.unique().tolist())
    except Exception as error:
        print(name, type(error).__name__, "only 0-dimensional arrays" in str(error))
PYTHON

python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
# torch holds the tensors only: any build will do.
"$python" -m pip install --quiet --disable-pip-version-check --no-deps \
  torch==2.13.0 triton==3.6.0 numpy==2.4.6 typing-extensions==4.16.0 filelock==3.20.0 \
  sympy==1.14.0 mpmath==1.3.0 networkx==3.6 jinja2==3.1.6 markupsafe==3.0.4 fsspec==2025.10.0
try() {
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
  seen=$(TRITON_INTERPRET=1 "$python" -W ignore "$folder/kernels.py")
  printf '%s:\n%s\n' "$*" "$seen"
}

fails=$'once [2.0]\nloop InterpreterError True'
works=$'once [2.0]\nloop [2.0]'
try triton==3.6.0 numpy==2.4.6
[ "$seen" = "$fails" ]
try triton==3.6.0 numpy==2.3.5
[ "$seen" = "$works" ]
try triton==3.9.0 numpy==2.4.6
[ "$seen" = "$works" ]
echo "as described"
