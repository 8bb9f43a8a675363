"""The life of a record, and the decisions around it: retries, breakers, fairness, backpressure."""
