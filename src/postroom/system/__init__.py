"""Access to the operating system: locks, whole-file updates, handles across fork, clocks."""
