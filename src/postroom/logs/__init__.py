"""Append-only files: written under a lock, read without one. Bytes are never overwritten or lost.

Contracts and the server import the file of their kind; nothing here knows a contract, a store or a server.
"""
