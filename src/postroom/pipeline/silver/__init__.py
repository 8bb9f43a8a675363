"""The silver layer: events without repeats, messages, attempts and spans."""
