"""Replacement rules: which expert leaves, with nothing fetched ahead. ``belady`` and ``static`` are the bounds."""
