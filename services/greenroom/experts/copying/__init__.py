"""Moves bytes from tier to tier: the links, their threads, memory and devices."""
