"""From the checkpoints that a definition names to one pack, and the architectures that can compute with it."""
