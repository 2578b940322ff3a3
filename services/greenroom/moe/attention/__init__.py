"""Attention over rows of many sequences, and the KV cache under it."""
