"""Workers: claiming, running handlers, and committing their outcomes."""
