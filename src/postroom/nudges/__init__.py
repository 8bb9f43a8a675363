"""Wake-ups. They may be lost, duplicated or late: after each one the reader checks the data itself.

Imports `system`, and never a store or a log: a wake-up carries the name of a queue, and no message.
"""
