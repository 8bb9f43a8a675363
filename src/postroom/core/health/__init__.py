"""Verdicts about a system: whether messages flow, and what the doctor concludes."""
