"""The life of a record, and the decisions around it: retries, breakers, fairness, backpressure.

Only `lifecycle` makes the step from one record to the next. Stores commit steps, and never change records.
"""
