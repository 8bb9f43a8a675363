"""The command line: a command parses its options, calls one method of the library, and prints the result.

`shell` and `render` have what all commands share. Only tools and tests import this package.
"""
