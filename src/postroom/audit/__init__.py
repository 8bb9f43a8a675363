"""Where the audit stream goes: segments on a disk, chained by hash, and copies of them elsewhere."""
