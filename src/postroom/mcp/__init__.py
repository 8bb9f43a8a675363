"""postroom as an MCP server: tools, resources and prompts for agents, over stdio and HTTP.

Rule 1: every tool calls routes of the task server, so tokens, roles and limits are the same everywhere.
Rule 2: nothing outside of `server`, `stdio` and `mount` imports the MCP library, which takes a second.
"""
