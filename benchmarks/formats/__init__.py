"""Experts as they are stored, beside the same experts in bf16: `make bench-formats`."""
