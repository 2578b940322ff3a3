"""Which experts there are, which comes after which, and how probably each is used. No torch, no model files."""
