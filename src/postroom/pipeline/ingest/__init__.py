"""From segments to bronze: which are new, how lines are read, and a source and sink for Spark."""
