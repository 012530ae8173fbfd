"""Which kernels run on a device."""

from __future__ import annotations

import torch

from rootlace.kernels.interface import KernelSet
from rootlace.kernels.reference import REFERENCE


def kernels_for(device: torch.device) -> KernelSet:
    """The kernel set for `device`. Every device has the reference set for now."""
    return REFERENCE
