"""Versions of artifacts: kept in files, served, pinned, rolled back."""
