"""Choice of the kernels for a device."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Iterable

import torch
from msgspec.structs import replace

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference import REFERENCE

OLDEST_TRITON = (3, 6)
OLDEST_CAPABILITY = (8, 0)

OPERATIONS = {
    "attention": ("plan_attention", "paged_attention"),
    "sampling": ("pick_tokens",),
    "logits": ("edit_logits", "token_logprobs"),
    "constraints": ("step_automata",),
    "linear": ("linear",),
    "rope": ("rope_and_write",),
    "norms": ("rms_norm", "add_rms_norm"),
    "activations": ("silu_mul", "gelu_mul"),
    "embedding": ("embedding", "feed_tokens"),
    "copies": ("copy_slots",),
}
"""Groups of operations that the reference can compute in place of a set's own kernels."""

log = logging.getLogger(__name__)


def with_reference(kernels: KernelSet, groups: Iterable[str]) -> KernelSet:
    """Replace the operations of `groups` (keys of `OPERATIONS`) by the reference's. Raises
    ValueError for an unknown group."""
    names = tuple(groups)
    unknown = sorted(set(names) - OPERATIONS.keys())
    if unknown:
        raise ValueError(f"unknown operations {unknown}; there are {sorted(OPERATIONS)}")
    taken = {name: getattr(REFERENCE, name) for group in names for name in OPERATIONS[group]}
    return replace(kernels, **taken) if taken else kernels


def kernels_for(device: torch.device) -> KernelSet:
    """Return the Triton kernels on a supported CUDA GPU, otherwise the reference. A GPU's fallback
    to the reference is logged with its reason. No other module imports triton."""
    if device.type == "cpu":
        return REFERENCE
    reason = why_not_triton(device)
    if reason is None:
        try:
            from rootlace.kernels.triton import TRITON
        except ImportError as error:
            reason = f"triton cannot be imported: {error}"
        else:
            return TRITON
    log.warning("%s: the reference kernels run, which are slow: %s", device, reason)
    return REFERENCE


def why_not_triton(device: torch.device) -> str | None:
    """Return the reason why the Triton kernels cannot run on `device`; None if they can."""
    if device.type != "cuda" or torch.version.cuda is None:
        return "the Triton kernels are for CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        found, wanted = (f"{major}.{minor}" for major, minor in (capability, OLDEST_CAPABILITY))
        return f"its compute capability is {found}, the Triton kernels want {wanted}"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "triton is not installed"
    if _release(version) < OLDEST_TRITON:
        return f"triton is {version}; {'.'.join(map(str, OLDEST_TRITON))} or newer is needed"
    return None


def _release(version: str) -> tuple[int, int]:
    """Parse major and minor number of a version such as 3.6.0+git1234; (0, 0) if there are none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
