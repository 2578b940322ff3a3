"""Requests onto the log, tokens from workers, ends from the journal."""
