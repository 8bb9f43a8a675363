"""The parts of `bench_brokers.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for the private servers of the tests
