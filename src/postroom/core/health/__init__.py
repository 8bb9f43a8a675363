"""Health as pure functions: `health` judges whether messages flow, `diagnosis` the facts of `postroom doctor`.

Facts are arguments. Whoever shows health asks `judge`, and decides nothing itself.
"""
