"""Access to the operating system: locks, whole-file updates, handles across fork, clocks, keys and TLS.

Imports `core`, and never a store, a log or a contract: nothing here knows what a message is.
"""
