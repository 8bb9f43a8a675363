"""Retention: deletes old rows from the tables, and remembers their numbers."""
