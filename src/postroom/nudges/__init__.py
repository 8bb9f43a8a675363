"""Wake-ups. They may be lost, duplicated or late: after each one the reader checks the data itself."""
