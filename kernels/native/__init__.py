"""Kernels in C++ for CPUs, compiled where they run: optional, the reference needs no compiler."""
