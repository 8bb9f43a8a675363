"""`postroom up`: supervised parts, and the traffic of its demo."""
