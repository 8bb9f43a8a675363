"""`postroom audit`: the stream of all events."""
