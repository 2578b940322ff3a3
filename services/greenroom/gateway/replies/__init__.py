"""From generated tokens to what a client is told."""
