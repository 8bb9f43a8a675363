"""The data pipeline: tables, checks and reports over the whole audit stream."""
