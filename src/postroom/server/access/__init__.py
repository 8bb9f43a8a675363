"""Who may use how much: registries of agents and tokens, names, shares, rates, and refused calls."""
