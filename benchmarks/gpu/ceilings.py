"""The device's ceilings, of which other results are shares."""

from __future__ import annotations

import torch

from benchmarks.gpu.setting import Findings, Setting
from benchmarks.gpu.timing import time_one

COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192


def measure(setting: Setting, findings: Findings) -> None:
    """Measure `copy_bandwidth`, bytes read and written per second by a large copy, and
    `matmul_rate`, FLOP/s of a bfloat16 product of random matrices, 8192 x 8192 x 8192."""
    device = setting.device
    count = 1 << 20 if setting.smoke else COPY_BYTES
    source = torch.randint(0, 127, (count,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = time_one(setting, lambda: target.copy_(source))
    findings.add({"what": "copy", "bytes": 2 * count, **copy.as_json()})
    findings.set("copy_bandwidth", 2 * count / copy.median)
    size = 64 if setting.smoke else MATMUL_SIZE
    a, b = torch.randn((2, size, size), device=device).to(torch.bfloat16)
    out = torch.empty_like(a)
    product = time_one(setting, lambda: torch.mm(a, b, out=out))
    findings.add({"what": "bf16 matmul", "size": size, **product.as_json()})
    findings.set("matmul_rate", 2 * size**3 / product.median)
