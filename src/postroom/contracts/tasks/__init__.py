"""`Tasks`, a task queue for each agent: the contract, its verbs inside one transaction, and its views."""
