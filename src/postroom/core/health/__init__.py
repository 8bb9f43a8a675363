"""Health as pure functions: whether messages flow (`health`), and what the doctor concludes (`diagnosis`).

Facts are arguments. Whoever shows health asks `judge`, and decides nothing itself.
"""
