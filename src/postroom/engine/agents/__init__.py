"""Agents of the engine: coordinators, requests, answers and inboxes."""
