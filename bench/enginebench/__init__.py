"""The parts of `bench_engine.py`: each part is a module, and so is each peer's application."""
