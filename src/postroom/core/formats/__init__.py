"""Formats of files and lines: buses, queues, events, backups, manifests, and JSON of other programs.

Bytes come in and values go out: nothing here opens a file or decides what happens to a message.
"""
