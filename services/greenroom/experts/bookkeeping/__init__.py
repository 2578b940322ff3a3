"""Which expert is in which slot of which tier, and what was counted."""
