"""Triton kernels: one operation per file, each tested against its reference."""
