"""`Engine`: a global queue with goals, the knowledge graph, decisions, recovery and sandboxes."""
