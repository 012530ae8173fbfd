"""Kernels: one interface, a reference implementation in torch, room for accelerated ones."""

from rootlace.kernels.dispatch import kernels_for
from rootlace.kernels.interface import AttentionBatch, KernelSet

__all__ = ["AttentionBatch", "KernelSet", "kernels_for"]
