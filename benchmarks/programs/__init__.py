"""The parts of `benchmarks.programs`; each workload has a file of its own."""
