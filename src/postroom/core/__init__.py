"""Pure decisions: no clock, no randomness, no files, no sockets, no threads. Facts come in as arguments."""
