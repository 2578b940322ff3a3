"""`make bench-engine`: the engine beside transformers and accelerate, in one run, and beside what the link allows."""
