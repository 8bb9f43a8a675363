"""Generated histories, for tests and benchmarks."""
