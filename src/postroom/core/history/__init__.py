"""Histories of events: checks of their guarantees, their order, and their trees.

Reads the events of the audit stream alone. It knows no store and no file.
"""
