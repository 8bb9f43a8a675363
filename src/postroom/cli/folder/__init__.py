"""Commands for a whole data folder: backup, doctor, keys, move, verify, tls."""
