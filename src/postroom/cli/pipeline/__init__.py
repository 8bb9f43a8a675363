"""`postroom pipeline`: tables, checks and reports of the audit stream."""
