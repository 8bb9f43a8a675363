"""The schema of a SQLite store as numbered scripts. Each script upgrades from the previous version."""
