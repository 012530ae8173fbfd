#!/usr/bin/env bash
# mlx 0.32.4 quantises a layer to `nvfp4` with one float8_e4m3 scale for 16 weights and no float32 scale above them, which
# NVFP4 has elsewhere (compressed-tensors' `weight_global_scale`). e4m3 begins at 2^-9, so the scale of small weights is rounded
# coarsely, or to 0: at a standard deviation of 0.005 the error is larger than that of `mxfp4`, which has half as many scales; at
# 0.002 19 of 20 weights become 0, at 0.001 all; beyond 2,688 the largest are cut off. Nothing warns, and all shapes are right.
# `mlx_lm.convert --q-mode nvfp4` (mlx-lm 0.32.2) makes dense layers so; its `global_scale` is for experts alone.
# `mx.quantize(..., global_scale=...)` has the scale: the largest magnitude of the tensor.
#
# Guessed before: a scale of the tensor, and the same relative error at any magnitude. Found 2026-11-30.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check mlx==0.32.4 mlx-cpu==0.32.4 numpy==2.4.6

seen=$("$python" -W ignore - <<'PYTHON'
import mlx.core as mx
import mlx.nn as nn
import numpy

mx.set_default_device(mx.cpu)
normal = numpy.random.default_rng(0).standard_normal((64, 256)).astype(numpy.float32)


def error(found, weight):
    lost = int(100 * (found == 0).astype(mx.float32).mean().item())
    return f"{(mx.linalg.norm(found - weight) / mx.linalg.norm(weight)).item():.2f} (zeros {lost} %)"


for deviation in (10000.0, 1.0, 0.1, 0.02, 0.005, 0.002, 0.001):
    weight = mx.array(normal * deviation)
    said = []
    for mode in ("mxfp4", "nvfp4"):
        layers = nn.Sequential(nn.Linear(256, 64, bias=False))
        layers.layers[0].weight = weight
        nn.quantize(layers, mode=mode)
        said.append(f"{mode} {error(layers(mx.eye(256)).T, weight)}")
    largest = mx.abs(weight).max()
    parts = mx.quantize(weight, mode="nvfp4", global_scale=largest)
    scaled = mx.dequantize(*parts, mode="nvfp4", global_scale=largest)
    print(f"deviation {deviation}:", *said, f"with global_scale {error(scaled, weight)}", sep="  ")
PYTHON
)
printf '%s\n' "$seen"
expected=$(cat <<'TEXT'
deviation 10000.0:  mxfp4 0.12 (zeros 10 %)  nvfp4 0.80 (zeros 0 %)  with global_scale 0.09 (zeros 6 %)
deviation 1.0:  mxfp4 0.12 (zeros 10 %)  nvfp4 0.09 (zeros 6 %)  with global_scale 0.09 (zeros 6 %)
deviation 0.1:  mxfp4 0.12 (zeros 11 %)  nvfp4 0.09 (zeros 6 %)  with global_scale 0.09 (zeros 6 %)
deviation 0.02:  mxfp4 0.12 (zeros 10 %)  nvfp4 0.10 (zeros 6 %)  with global_scale 0.09 (zeros 6 %)
deviation 0.005:  mxfp4 0.12 (zeros 10 %)  nvfp4 0.13 (zeros 8 %)  with global_scale 0.09 (zeros 6 %)
deviation 0.002:  mxfp4 0.12 (zeros 10 %)  nvfp4 0.96 (zeros 95 %)  with global_scale 0.09 (zeros 6 %)
deviation 0.001:  mxfp4 0.12 (zeros 10 %)  nvfp4 1.00 (zeros 100 %)  with global_scale 0.09 (zeros 6 %)
TEXT
)
[ "$seen" = "$expected" ] || { echo "this is not what was found" >&2; exit 1; }
echo "as described"
