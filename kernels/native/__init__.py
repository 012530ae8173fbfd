"""Optional kernels in C++ for CPUs, compiled on the machine."""
