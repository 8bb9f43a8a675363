"""`postroom queue`, and `zos-mq` with the options of the original program."""
