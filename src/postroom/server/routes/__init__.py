"""The routes of the task server: the table, the handlers, and answers that hold records of the contracts.

A handler takes the decoded verb from `request.call` and returns its answer. It imports the contracts and the
server, and is imported by the page for what both show; never by MCP, which calls the routes.
"""
