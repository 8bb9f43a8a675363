"""Pure decisions about goals: advice, conflicts, merges, and which agents need a sandbox."""
