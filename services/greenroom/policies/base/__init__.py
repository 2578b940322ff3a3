"""What every policy stands on: the interface, what happens to a pool, and helpers that policies share."""
