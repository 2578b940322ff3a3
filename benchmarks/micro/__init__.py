"""Benchmarks of one file each, of one mechanism each: `python -m benchmarks.NAME`."""
