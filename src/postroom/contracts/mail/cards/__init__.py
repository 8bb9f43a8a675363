"""Cards of agents, and the search for words in them."""
