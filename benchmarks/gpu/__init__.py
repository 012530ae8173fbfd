"""The parts of `benchmarks.gpu`, each measured in its own process."""
