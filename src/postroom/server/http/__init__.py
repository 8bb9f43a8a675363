"""Connections, requests, the writer that commits for all of them, and the calls that stay open."""
