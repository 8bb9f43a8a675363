"""Keys, encryption of values at rest, and TLS."""
