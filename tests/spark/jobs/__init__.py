"""What is done with the tables: jobs, commands, sources, servers and clusters."""
