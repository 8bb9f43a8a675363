"""The knowledge graph: its nodes, the branches of goals, and where it is kept."""
