"""The data folder: its layout, manifest, buses, backups and keys, and the shipping of its events.

Servers and commands use it. It reads stores and logs through their own rooms, and answers no request.
"""
