"""Computes a layer's experts, by torch's products or by the compiled ones."""
