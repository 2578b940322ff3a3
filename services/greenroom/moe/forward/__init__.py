"""A forward pass over rows of many sequences at once."""
