"""The command line: parse, call a contract, print."""
