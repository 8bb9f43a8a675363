"""Questions about the tables, by DuckDB: SQL, checks, expectations; and views for a session of Spark."""
