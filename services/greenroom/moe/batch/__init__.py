"""Continuous batching: the loop, its sequences, and sampling."""
