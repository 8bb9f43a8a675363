"""Work on a data folder: its buses, its manifest, backups, checks, keys, and the shipping of its events."""
