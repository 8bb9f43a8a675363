"""Histories of events: checks of their guarantees, their order, and their trees."""
