"""The routes of the task server: the table, the schemas and the handlers."""
