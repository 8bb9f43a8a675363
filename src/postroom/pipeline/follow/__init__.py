"""How a table follows its inputs: which keys changed, their new rows, and the files that these replace."""
