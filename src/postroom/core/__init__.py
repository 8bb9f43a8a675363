"""Pure decisions: facts come in as arguments, and decisions go out as values.

Every room may import it. It imports `message` and `errors`, and never a clock, randomness, files, sockets,
threads or asyncio. Inside, `formats`, `lifecycle` and `door` import only names, times and redaction.
"""
