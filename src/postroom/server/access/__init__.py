"""Who may use how much: registries of agents and tokens, names, shares, turns, rates, and refused calls.

Every other room of the server may import these modules. They know no route and no connection.
"""
