"""The parts of `benchmarks.overload`."""
