"""Append-only files: appended under a lock, read without one. Bytes are never overwritten or lost."""
