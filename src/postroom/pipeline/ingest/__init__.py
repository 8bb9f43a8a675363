"""From segments of the audit stream to bronze tables."""
