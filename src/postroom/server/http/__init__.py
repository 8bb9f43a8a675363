"""HTTP: connections, requests, the writer that commits for all of them, and the calls that stay open.

The routes are built on these modules, and must never be imported by them, except for the schema of an error.
"""
