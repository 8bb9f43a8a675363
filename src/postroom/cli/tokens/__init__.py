"""`postroom token`: the tokens of agents, operators and admins."""
