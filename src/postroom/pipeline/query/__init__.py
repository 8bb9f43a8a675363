"""Questions about the tables: SQL, checks, expectations, and the views that others query."""
