"""The parts of `benchmarks.gpu`: each measures one thing and is run in a process of its own."""
