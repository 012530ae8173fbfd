"""The parts of `benchmarks/gpu.py`: each measures one thing and is run in a process of its own."""
