"""Formats of files and lines: buses, queues, events, backups, manifests, and JSON of others."""
