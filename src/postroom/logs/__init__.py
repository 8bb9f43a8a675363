"""The file half: append under a lock, read without one, keep positions, rotate, never lose a byte."""
