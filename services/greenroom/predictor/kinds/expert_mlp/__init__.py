"""DuoServe-MoE's own predictor (its §4): a network from a token's picks so far to its next ones."""
