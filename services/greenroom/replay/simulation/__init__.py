"""Timed replay: the engine itself on simulated links and a virtual clock."""
