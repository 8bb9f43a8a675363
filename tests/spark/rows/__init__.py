"""What the tables say: each row beside an oracle or a story, each transform by itself."""
