"""Continuous batching: the loop, its sequences, sampling."""
