"""The schema of a PostgreSQL store as numbered scripts, and its queries by name (`queries.sql`)."""
