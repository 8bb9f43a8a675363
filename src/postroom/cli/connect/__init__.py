"""`postroom connect`: writes the settings that make an agent program use postroom over MCP.

What is written is decided by functions of text; the command asks, makes the token and replaces the file.
"""
