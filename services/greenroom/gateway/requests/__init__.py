"""From a call to the sequences to generate, and one task each that generates it."""
