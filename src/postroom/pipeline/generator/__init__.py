"""Generated histories, for tests and benchmarks. They write segments, and know no tables."""
