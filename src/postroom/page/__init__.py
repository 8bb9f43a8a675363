"""The live page: its views, its sessions, and the stream of changes. `postroom top` draws it as text.

The task server mounts `mount`. Views read the engine through the server's routes, and never write a store.
"""
