"""The parts of `benchmarks.programs`; each workload has a separate file."""
