"""What both halves need from the machine: locks, whole-file updates, handles across fork, clocks."""
