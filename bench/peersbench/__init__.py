"""The brokers and the Celery application that `bench_peers.py` measures."""
