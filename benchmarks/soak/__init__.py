"""The parts of `benchmarks.soak`."""
