"""Decisions about messages inside one transaction. No module here opens a store, a thread or a loop."""
