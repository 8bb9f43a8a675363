"""What became of every message, as tables."""
