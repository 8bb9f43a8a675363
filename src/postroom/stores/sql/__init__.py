"""The schema: numbered scripts, each a step forward from the one before."""
