"""The verbs: one declaration each, with fields, route, permission, answer and words.

The server, the thin clients, MCP and the command line derive from these structs. Imports the standard
library, msgspec, `postroom.errors` and `postroom.message`; never anything that opens a file or a socket.
"""
