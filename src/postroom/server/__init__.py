"""Servers and background processes around the contracts. `app` is the task server."""
