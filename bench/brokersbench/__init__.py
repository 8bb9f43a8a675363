"""The parts of `bench_brokers.py`."""
