"""Delta tables: their logs, commits and files."""
