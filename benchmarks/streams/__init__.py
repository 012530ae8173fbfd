"""The parts of `benchmarks.streams`."""
