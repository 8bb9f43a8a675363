"""What holds for the tests of the benches: every figure is measured once."""

import os

os.environ["BENCH_REPEATS"] = "1"  # before a bench is imported
