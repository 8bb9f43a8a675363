"""What works on the audit stream as a whole."""
