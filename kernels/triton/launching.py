"""How a kernel is launched on an architecture: looked up in a small committed table.

Nothing is tried out when a server starts. `tuned/sm_90.json` and its like are written by a
measurement on that architecture (`python -m benchmarks.gpu --tune`) or by hand; an architecture
without a table takes `tuned/default.json`, whose entries fit every GPU from compute capability 8.0
on (99 KiB of shared memory). One file:

    {
      "measured": {"gpu": "NVIDIA H200", "triton": "3.6.0", "date": "2026-11-21"} or null,
      "kernels": {
        "decode_attention": [
          {"when": {"head_dim": {"most": 64}}, "blocks": {"BLOCK_N": 128},
           "num_warps": 4, "num_stages": 3},
          {"when": {"dtype": "bf16", "fp8": true}, "blocks": {"BLOCK_N": 64},
           "num_warps": 4, "num_stages": 4},
          {"when": {}, "blocks": {"BLOCK_N": 64}, "num_warps": 4, "num_stages": 3}
        ]
      }
    }

`measured` is null for a table nobody has measured yet. A kernel's entries are tried in order, and
the first whose conditions all hold is taken: a condition is a value that the key must equal, or
`{"most": n}`, an upper bound. The last entry has no condition, so that there always is an answer.
The keys are the kernel's own (they stand where it calls `settings`); all entries of a kernel name
the same blocks, in every table.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Variants -----------------------------------------------------------------------------------------
#
# What is compiled ahead of time to see that it compiles: kernels as they are really launched.


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel, as `triton.compile` wants it.

    `types` has the types of the kernel's parameters ("*bf16", "fp32"); those that it lacks are
    integers of 32 bits, or pointers to such where the name ends with "_ptr". `constants` gives the
    compile-time ones; `divisible` names pointers and integers that are multiples of 16.
    `fp_fusion`: products and sums may be one operation, rounded once. `matrix_units`: its PTX must
    use them.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    matrix_units: bool = False

    @property
    def signature(self) -> dict[str, str]:
        """Every parameter of the kernel in order, with its type or "constexpr"."""
        rest = {name: "*i32" if name.endswith("_ptr") else "i32" for name in self.kernel.arg_names}
        constant = dict.fromkeys(self.constants, "constexpr")
        return {name: constant.get(name) or self.types.get(name, rest[name]) for name in rest}


# Tuning -------------------------------------------------------------------------------------------


TABLES = Path(__file__).parent / "tuned"
DEFAULT = "default"

Key = int | str | bool


@dataclass(frozen=True)
class Launch:
    """Sizes of a kernel's blocks by the names of its parameters, and how it is compiled."""

    blocks: Mapping[str, int]
    num_warps: int
    num_stages: int


@functools.cache
def settings(kernel: str, arch: int, **key: Key) -> Launch:
    """The launch of `kernel` on compute capability `arch` (90 for 9.0) for a case.

    Raises KeyError if the kernel is in no table.
    """
    table = _table(arch)
    if kernel not in table:
        table = _table(0)
    for entry in table[kernel]:
        if all(_holds(key, name, wanted) for name, wanted in entry["when"].items()):
            blocks = MappingProxyType(dict(entry["blocks"]))
            return Launch(blocks, entry["num_warps"], entry["num_stages"])
    raise KeyError(f"no entry of {kernel} for {key}: its last one must have no condition")


def forget() -> None:
    """Read the tables again at their next use, as one was written while kernels run."""
    settings.cache_clear()
    _table.cache_clear()


@functools.cache
def _table(arch: int) -> dict[str, list[dict[str, Any]]]:
    path = TABLES / f"sm_{arch}.json"
    if not path.exists():
        path = TABLES / f"{DEFAULT}.json"
    kernels: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["kernels"]
    return kernels


def _holds(key: Mapping[str, Key], name: str, wanted: Any) -> bool:
    value = key[name]
    if isinstance(wanted, dict):
        return isinstance(value, int) and value <= int(wanted["most"])
    return bool(value == wanted)
