"""Servers and background processes around the contracts. `app` is the task server.

Everything below may be imported, but neither the page nor MCP: they mount themselves on the application.
"""
