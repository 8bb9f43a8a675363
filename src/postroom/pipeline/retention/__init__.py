"""How long the tables keep what happened."""
