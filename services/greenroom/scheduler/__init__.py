"""The scheduler: one pool's requests onto its workers, with exactly one outcome each."""
