"""The work for agents in the background: the harness, nudges, programs of agents, worker processes.

It uses the contracts and the engine as any program could. Routes and connections must never be imported.
"""
