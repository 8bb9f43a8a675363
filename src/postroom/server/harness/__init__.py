"""The processes that work for agents: the harness, nudges, programs of agents, workers."""
