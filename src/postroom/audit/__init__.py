"""Where the audit stream goes: segments on a disk, chained by hash, and copies of them elsewhere.

Import the writer, the reader, the shipper and `verify`. A source of events never lives here: feeds are above.
"""
