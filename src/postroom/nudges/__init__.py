"""Wake-ups. A nudge may be lost, doubled or late: after every wake the reader looks at the log itself."""
