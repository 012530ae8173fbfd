"""The parts of `benchmarks.host_overhead`."""
