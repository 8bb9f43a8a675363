"""Delta tables: their logs, commits and files. Nothing here knows what a table is about."""
