"""Routing traces: the arrays and their file, their steps, their recording."""
