"""Codes of 4 bits in groups that share a scale: how GPTQ, AWQ and compressed-tensors store them, and their records."""
